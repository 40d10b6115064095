package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// shows asserts that a balance lists lots with these references, and that a draw of a unit takes of the first of them.
func (f *fixture) shows(references ...string) {
	f.Helper()
	shown := []string{}
	for _, l := range f.balance().Lots {
		shown = append(shown, l.Reference)
	}
	require.Equal(f, references, shown)
	require.Equal(f, references[0], f.draw(1).Lots[0].Reference)
}

// Units that rolled over are as old as their first grant, however often they did, and whoever wrote it.
func TestOrderOf_UnitsThatRolledOverIsByTheirFirstGrant(t *testing.T) {
	t.Parallel()
	for _, swept := range []bool{true, false} {
		for _, first := range []string{"rolls", "stays"} {
			t.Run(fmt.Sprint(first, " first, swept ", swept), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, wallet.Config{})
				grants := []wallet.Grant{
					{Amount: 10, Reference: "rolls", Ends: wallet.At(noon.Add(day)), Roll: &wallet.Roll{Cap: 10, Lasts: wallet.For(day), Times: 2}},
					{Amount: 10, Reference: "stays", Ends: wallet.At(noon.Add(3 * day))},
				}
				if first == "stays" {
					grants[0], grants[1] = grants[1], grants[0]
				}
				f.grant(grants[0])
				f.clock.Advance(time.Hour)
				f.grant(grants[1])
				for range 5 {
					f.clock.Advance(12 * time.Hour)
					if swept {
						f.sweeps()
					}
				}
				f.shows(grants[0].Reference, grants[1].Reference)
			})
		}
	}
}

// Units of two lots come back to them at once: the older one pays what was drawn for their use, also where the younger one was scheduled before.
func TestOrderOf_LotsThatPayForTheirUseIsByAge(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 10})
	f.grant(wallet.Grant{Amount: 5, Reference: "scheduled", Uses: []string{"images"}, Starts: noon.Add(2 * time.Hour)})
	f.clock.Advance(time.Hour)
	f.grant(wallet.Grant{Amount: 5, Reference: "older", Uses: []string{"images"}})
	f.clock.Advance(2 * time.Hour)
	images := budget.Note{Use: "images"}
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		return f.holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: time.Hour, Lines: []holds.Line{f.book.Line("ann", 10)}, Note: images})
	})
	require.NoError(t, err)
	f.mustDraw(toDraw{Wallet: "ann", Amount: 4, Note: images})
	f.release("h")
	left := map[string]int64{}
	for _, l := range f.balance().Lots {
		left[l.Reference] = l.Units
	}
	require.Equal(t, map[string]int64{"older": 1, "scheduled": 5}, left)
}

// The numbers of a wallet's lots are no order: a wallet that moved to another cell goes on with numbers of that one.
func TestOrderOf_LotsIsByTheirGrantsAfterAMoveOfCells(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	number := func(no int) {
		_, err := f.pool.Exec(t.Context(), "select setval(pg_get_serial_sequence('metered.lot_rows', 'no'), $1)", no)
		require.NoError(t, err)
	}
	for i, no := range []int{1000, 500, 2000, 100} {
		number(no)
		f.grant(wallet.Grant{Amount: 10, Reference: fmt.Sprint("anything ", i), Ends: wallet.At(noon.Add(day))})
		f.grant(wallet.Grant{Amount: 10, Reference: fmt.Sprint("images ", i), Ends: wallet.At(noon.Add(2 * day)), Uses: []string{"images"}})
	}
	f.shows("anything 0", "anything 1", "anything 2", "anything 3", "images 0", "images 1", "images 2", "images 3")
	f.draw(39)
	d, err := f.tryDraw(toDraw{Amount: 40, Note: budget.Note{Use: "images"}})
	require.NoError(t, err)
	for i, l := range d.Lots {
		require.Equal(t, fmt.Sprint("images ", i), l.Reference)
	}
}

// At one instant the oldest lot ends first: where a cap is shared, its units are those that go on.
func TestOrderOf_EndsAtOneInstantIsByAge(t *testing.T) {
	t.Parallel()
	for _, swept := range []bool{true, false} {
		t.Run(fmt.Sprint("swept ", swept), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			for i, no := range []int{1000, 500} {
				_, err := f.pool.Exec(t.Context(), "select setval(pg_get_serial_sequence('metered.lot_rows', 'no'), $1)", no)
				require.NoError(t, err)
				f.grant(wallet.Grant{Amount: 10, Reference: fmt.Sprint(i), Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 10, Lasts: wallet.For(day), Shared: true}})
			}
			f.clock.Advance(day)
			if swept {
				f.sweeps()
			}
			require.Equal(t, map[string]int64{"0": 10}, f.left())
		})
	}
}

// Lots of plans that begin at one instant are as old as the beginnings that brought them, however long nobody looked.
func TestOrderOf_PlansThatRenewTogetherIsByTheirBeginnings(t *testing.T) {
	t.Parallel()
	for _, swept := range []bool{true, false} {
		t.Run(fmt.Sprint("swept ", swept), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 10, Reference: "first", Ends: wallet.EachPeriod(daily)})
			f.clock.Advance(day)
			f.grant(wallet.Grant{Amount: 10, Reference: "second", Ends: wallet.EachPeriod(daily), Starts: f.clock.Now().Add(time.Hour)})
			for range 48 {
				f.clock.Advance(time.Hour)
				if swept {
					f.sweeps()
				}
			}
			at := " " + f.clock.Now().Truncate(day).Format("2006-01-02T15:04:05Z")
			f.shows("first"+at, "second"+at)
		})
	}
}

// Units that were revoked come back to the oldest of the lots that had them first, also where a younger one has a lower
// number, as in a wallet that moved to another cell.
func TestOrderOf_LotsThatGetRevokedUnitsBackIsByAge(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	number := func(no int) {
		_, err := f.pool.Exec(t.Context(), "select setval(pg_get_serial_sequence('metered.lot_rows', 'no'), $1)", no)
		require.NoError(t, err)
	}
	number(1000)
	first := f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(5 * day)})
	number(10)
	f.clock.Advance(time.Hour)
	second := f.rollover(wallet.Rollover{Reference: "a", Cap: 4, For: 10 * day})
	require.EqualValues(t, 4, second.Amount)
	require.Less(t, second.Lot, first.Lot)
	taken, err := f.revoke(wallet.Revoke{Reference: "a"})
	require.NoError(t, err)
	require.EqualValues(t, 10, taken.Amount)
	_, err = f.reinstate(wallet.Revoke{Reference: "a", Amount: 6})
	require.NoError(t, err)
	lots := f.balance().Lots
	require.Len(t, lots, 1, "all of them come back to the first one")
	require.Equal(t, first.Lot, lots[0].Lot)
}

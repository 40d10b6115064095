package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

func (f *fixture) setEnd(l wallet.LotEnd) (wallet.Granted, error) {
	l.Wallet = "ann"
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.SetEnd(ctx, tx, l) })
}

func (f *fixture) tryRollover(r wallet.Rollover) (wallet.Granted, error) {
	r.Wallet = "ann"
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Rollover(ctx, tx, r) })
}

// eachCall makes one call on a lot, by a name that a balance shows.
var eachCall = map[string]func(f *fixture, l wallet.Lot, byNumber bool) (units int64, err error){
	"revoke": func(f *fixture, l wallet.Lot, byNumber bool) (int64, error) {
		r := wallet.Revoke{Reference: l.Reference}
		if byNumber {
			r = wallet.Revoke{Lot: l.Lot}
		}
		got, err := f.revoke(r)
		return got.Amount, err
	},
	"roll over": func(f *fixture, l wallet.Lot, byNumber bool) (int64, error) {
		r := wallet.Rollover{Reference: l.Reference, Cap: 1000}
		if byNumber {
			r = wallet.Rollover{Lot: l.Lot, Cap: 1000}
		}
		got, err := f.tryRollover(r)
		return got.Amount, err
	},
	"set the end": func(f *fixture, l wallet.Lot, byNumber bool) (int64, error) {
		e := wallet.LotEnd{Reference: l.Reference, Expires: f.clock.Now().Add(time.Minute)}
		if byNumber {
			e.Reference, e.Lot = "", l.Lot
		}
		got, err := f.setEnd(e)
		return got.Amount, err
	},
}

// A name that a balance shows is accepted by each call, though nobody has written the lot.
func TestBalance_NamesLotsAsEachCallAcceptsThem(t *testing.T) {
	t.Parallel()
	for name, call := range eachCall {
		for _, swept := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", swept ", swept), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, wallet.Config{})
				f.grant(wallet.Grant{Amount: 10, Reference: "rolls", Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 7, Lasts: wallet.For(60 * day)}})
				f.grant(wallet.Grant{Amount: 300, Reference: "plan", Ends: wallet.EachPeriod(budget.Per(1, budget.Month, time.UTC, time.Time{}).Period)})
				f.clock.Set(time.Date(2027, 1, 10, 0, 0, 0, 0, time.UTC))
				if swept {
					f.sweeps()
				}
				lots := f.balance().Lots
				require.Len(t, lots, 2)
				carried, plan := lots[0], lots[1]
				if carried.Reference != "rolls" {
					carried, plan = plan, carried
				}
				require.Equal(t, "plan 2027-01-01T00:00:00Z", plan.Reference)
				units, err := call(f, carried, true)
				require.NoError(t, err)
				require.EqualValues(t, 7, units)
				units, err = call(f, plan, false)
				require.NoError(t, err)
				require.EqualValues(t, 300, units)
			})
		}
	}
}

// A plan has the references of its periods, begun or ended, written or not.
func TestGrant_FindsAReferenceOfAPeriodThatNobodyWrote(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 300, Reference: "plan", Ends: wallet.EachPeriod(budget.Per(1, budget.Month, time.UTC, time.Time{}).Period)})
	f.clock.Set(time.Date(2027, 2, 10, 0, 0, 0, 0, time.UTC))
	for _, reference := range []string{"plan 2027-01-01T00:00:00Z", "plan 2027-02-01T00:00:00Z"} {
		_, err := f.tryGrant(wallet.Grant{Wallet: "ann", Amount: 1, Reference: reference})
		require.ErrorIs(t, err, wallet.ErrConflict)
	}
	f.has(300)
}

// However many lots for uses have ended and are not written, nothing of one of them is left to roll over or to take back.
func TestLotsForUses_ThatEndedInACrowdHaveNothingLeft(t *testing.T) {
	t.Parallel()
	for _, lots := range pgtest.Sizes([]int{33}, []int{32, 33, 70}, []int{32, 33, 70}) {
		for _, call := range []string{"roll over", "revoke"} {
			t.Run(fmt.Sprint(call, " with ", lots), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, wallet.Config{})
				for n := range lots {
					f.grant(wallet.Grant{Amount: 5, Reference: fmt.Sprint(n), Ends: wallet.After(time.Hour + time.Duration(n)*time.Microsecond), Uses: []string{"images"}})
				}
				f.clock.Advance(58 * day)
				units, err := eachCall[call](f, wallet.Lot{Reference: fmt.Sprint(lots - 1)}, false)
				require.NoError(t, err)
				require.Zero(t, units)
				require.Zero(t, f.balance().For("images"))
				require.Empty(t, f.balance().Lots)
			})
		}
	}
}

// Units of a lot that was without end for a while roll over for as long as its grant says.
func TestSetEnd_ToNeverAndThenToADateRollsOverByTheGrantsRollFor(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string][]time.Time{"once": {noon.Add(3 * day)}, "never, and then": {{}, noon.Add(3 * day)}} {
		for _, lasts := range []time.Duration{2 * time.Hour, 0} {
			t.Run(fmt.Sprint(name, ", ", lasts), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, wallet.Config{})
				f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 10, Lasts: lasting(lasts)}})
				for _, end := range ends {
					_, err := f.setEnd(wallet.LotEnd{Reference: "a", Expires: end})
					require.NoError(t, err)
				}
				f.clock.Set(noon.Add(3 * day))
				want := time.Time{}
				if lasts > 0 {
					want = noon.Add(3*day + lasts)
				}
				require.Equal(t, want, f.balance().Lots[0].Expires)
				f.sweeps()
				require.Equal(t, want, f.balance().Lots[0].Expires)
			})
		}
	}
}

// A revocation of units that rolled over several times is reported, though nobody wrote that they did.
func TestRevoke_TellsAThresholdOfUnitsThatRolledOverTwiceUnwritten(t *testing.T) {
	t.Parallel()
	for _, swept := range []bool{true, false} {
		t.Run(fmt.Sprint("swept ", swept), func(t *testing.T) {
			t.Parallel()
			f := setUpReporting(t, low(50), nil)
			f.grant(wallet.Grant{Amount: 100, Reference: "a", Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 100, Lasts: wallet.For(day), Times: 3}})
			f.clock.Advance(3*day + time.Hour)
			if swept {
				f.sweeps()
			}
			require.EqualValues(t, 100, f.balance().Units)
			r, err := f.revoke(wallet.Revoke{Reference: "a", Amount: 60})
			require.NoError(t, err)
			require.EqualValues(t, 60, r.Amount)
			require.Equal(t, []string{"ann low 40"}, f.crossed())
		})
	}
}

// A purge leaves the lot that names a plan, as long as the plan renews, and as long after its end as it leaves entries.
func TestPurge_KeepsTheFirstLotOfAPlanThatRenews(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	plan := wallet.Grant{Wallet: "ann", Amount: 10, Reference: "plan", Ends: wallet.EachPeriod(daily)}
	f.grant(plan)
	for range 40 {
		f.clock.Advance(day)
		f.sweeps()
	}
	purge := func() {
		_, err := f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: 5 * day})
		require.NoError(t, err)
	}
	purge()
	g, err := f.tryGrant(plan)
	require.NoError(t, err)
	require.True(t, g.Replayed)
	require.EqualValues(t, 10, f.balance().Units)
	r, err := f.revoke(wallet.Revoke{Reference: "plan", Renewals: true})
	require.NoError(t, err)
	require.EqualValues(t, 10, r.Amount)
	f.clock.Advance(4 * day)
	require.Zero(t, f.balance().Units)

	// The message that ended it comes again, within the time that a purge leaves.
	f.grant(wallet.Grant{Amount: 1})
	purge()
	r, err = f.revoke(wallet.Revoke{Reference: "plan", Renewals: true})
	require.NoError(t, err)
	require.Zero(t, r.Amount)
	for range 40 {
		f.clock.Advance(day)
		f.draw(1)
		f.grant(wallet.Grant{Amount: 1})
	}
	f.sweeps()
	purge()
	_, err = f.revoke(wallet.Revoke{Reference: "plan", Renewals: true})
	require.ErrorIs(t, err, wallet.ErrUnknownLot)
}

// A renewal whose reference somebody else's lot has begins all the same, without one.
func TestRenews_WhereItsReferenceIsTakenHasNone(t *testing.T) {
	t.Parallel()
	for _, swept := range []bool{true, false} {
		f := setUp(t, wallet.Config{})
		f.grant(wallet.Grant{Amount: 7, Reference: "plan 2026-12-01T00:00:00Z", Ends: wallet.After(100 * day)})
		f.grant(wallet.Grant{Amount: 300, Reference: "plan", Ends: wallet.EachPeriod(budget.Per(1, budget.Month, time.UTC, time.Time{}).Period)})
		f.clock.Set(time.Date(2026, 12, 10, 0, 0, 0, 0, time.UTC))
		if swept {
			f.sweeps()
		}
		f.has(307)
		f.draw(307)
		f.sweeps()
		f.has(0)
	}
}

// The first lot of a plan is part of what its reference stands for.
func TestGrant_OfAReferenceWithAnotherFirstLotIsAConflict(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	month := budget.Per(1, budget.Month, time.UTC, time.Time{}).Period
	g := wallet.Grant{Wallet: "ann", Amount: 300, Reference: "plan", Ends: wallet.EachPeriodWithFirst(month, 5)}
	f.grant(g)
	g.Ends = wallet.EachPeriodWithFirst(month, 5)
	require.True(t, f.grant(g).Replayed)
	for _, other := range []wallet.Ends{wallet.EachPeriodWithFirst(month, 6), wallet.EachPeriodWithFirst(month, 0), wallet.EachPeriod(month)} {
		g.Ends = other
		_, err := f.tryGrant(g)
		require.ErrorIs(t, err, wallet.ErrConflict)
	}
	f.has(5)
}

// Units of a lot whose end was set roll over to the end of the period in which the lot ends now.
func TestSetEnd_RollsOverToTheEndOfTheNewPeriod(t *testing.T) {
	t.Parallel()
	for _, ends := range []time.Time{noon.Add(3 * day), noon.Add(time.Hour)} {
		f := setUp(t, wallet.Config{})
		f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 10, Lasts: wallet.ToEndOf(budget.Per(1, budget.Day, time.UTC, time.Time{}).Period)}})
		_, err := f.setEnd(wallet.LotEnd{Reference: "a", Expires: ends})
		require.NoError(t, err)
		f.clock.Set(ends)
		want := ends.Truncate(day).Add(day)
		require.Equal(t, want, f.balance().Lots[0].Expires)
		f.sweeps()
		require.Equal(t, want, f.balance().Lots[0].Expires)
		f.clock.Set(want)
		f.has(0)
	}
}

// A balance shows the lots that units have gone on in, however many went on at once. A call accepts each of their numbers.
func TestBalance_NamesEachLotThatOneOfManyWentOnIn(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	for n := range 40 {
		f.grant(wallet.Grant{Amount: 5, Reference: fmt.Sprint(n), Ends: wallet.At(noon.Add(time.Hour)), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day)}})
	}
	f.clock.Advance(2 * time.Hour)
	shown := f.balance().Lots
	require.Len(t, shown, 40)
	r, err := f.revoke(wallet.Revoke{Lot: shown[39].Lot})
	require.NoError(t, err)
	require.EqualValues(t, 5, r.Amount)
	require.EqualValues(t, 195, f.balance().Units)
}

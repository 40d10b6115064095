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
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// calls is how many calls of functions fn makes in a session.
func (f *fixture) calls(fn func(tx pgx.Tx) error) (n int64) {
	f.Helper()
	conn, err := f.pool.Acquire(f.Context())
	require.NoError(f, err)
	defer conn.Release()
	count := func() (n int64) {
		pgtest.FlushStatistics(f, conn)
		require.NoError(f, conn.QueryRow(f.Context(), "select coalesce(sum(calls), 0)::bigint from pg_stat_user_functions where schemaname = 'metered'").Scan(&n))
		return n
	}
	_, err = conn.Exec(f.Context(), "set track_functions = 'pl'")
	require.NoError(f, err)
	before := count()
	require.NoError(f, pgx.BeginFunc(f.Context(), conn, fn))
	n = count() - before
	_, err = conn.Exec(f.Context(), "reset track_functions")
	require.NoError(f, err)
	return n
}

// Few holds of a wallet that are due have an entry each, at its time. More than one step writes are freed by one entry with
// the sum of their units, at the time of the last, and a sweep ends them.
func TestDueHolds_OfAWalletEndTogether(t *testing.T) {
	t.Parallel()
	const few, many = 20, 400
	calls := map[int]int64{}
	for _, n := range []int{few, many} {
		f := setUp(t, wallet.Config{})
		f.grant(wallet.Grant{Amount: 10 * many, Reference: "a", Ends: wallet.After(30 * day)})
		f.grant(wallet.Grant{Amount: 10 * many, Reference: "b"})
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
			for i := range n {
				line := f.book.Line("ann", 20*many/int64(n)) // together they hold all of it
				if _, err := f.holds.Place(ctx, tx, holds.Placement{ID: fmt.Sprint(i), TTL: time.Hour + time.Duration(i%7)*time.Minute, Lines: []holds.Line{line}}); err != nil {
					return struct{}{}, err
				}
			}
			return struct{}{}, nil
		})
		require.NoError(t, err)
		require.Zero(t, f.balance().Units)
		f.clock.Advance(2 * time.Hour)
		before := f.balance()
		require.EqualValues(t, 20*many, before.Units)
		calls[n] = f.calls(func(tx pgx.Tx) error {
			d, err := f.drawIn(t.Context(), tx, toDraw{Wallet: "ann", Amount: 20*many - 1})
			require.EqualValues(t, 1, d.Left)
			return err
		})
		require.Equal(t, map[string]int64{"b": 1}, f.left())
		ended, last := 0, time.Time{}
		for e, err := range f.ledger.Entries(t.Context(), f.pool, "ann", budget.EntriesOptions{After: int64(n) + 2}) {
			require.NoError(t, err)
			require.False(t, e.At.Before(last))
			if last = e.At; e.Kind != "expire" {
				continue
			}
			ended++
			if n == many {
				require.Empty(t, e.Hold)
				require.EqualValues(t, 20*many, e.Amount)
				continue
			}
			h, err := f.holds.Get(t.Context(), f.pool, "", e.Hold, "")
			require.NoError(t, err)
			require.Equal(t, h.Deadline, e.At)
		}
		require.Equal(t, map[int]int{few: few, many: 1}[n], ended)
		f.verify()
		f.sweeps()
		require.EqualValues(t, n, pgtest.Value[int64](t, f.pool, "select count(*) from metered.holds where state = 'x' and not pending"))
		require.Equal(t, map[string]int64{"b": 1}, f.left())
		require.Zero(t, pgtest.Count(t, f.pool, "metered.lot_holds"))
		f.verify()
	}
	t.Logf("%d calls of functions with %d holds that are due, %d with %d", calls[few], few, calls[many], many)
	require.Less(t, calls[many], calls[few]+20)
}

// More holds than a step ends fall due in one instant: a sweep frees them once, and announces all.
func TestDueHolds_OfOneInstantAreSweptTogether(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 200})
	for i := range 60 {
		f.place(fmt.Sprint(i), 2, time.Hour)
	}
	f.clock.Advance(2 * time.Hour)
	f.sweeps()
	f.verify()
	require.EqualValues(t, 200, f.balance().Units)
	require.EqualValues(t, 60, pgtest.Value[int64](t, f.pool, "select count(*) from metered.holds where state = 'x' and not pending"))
	require.Zero(t, pgtest.Value[int64](t, f.pool, "select count(*) from metered.hold_lines where open > 0"))
	kinds, amounts := f.kinds(62)
	require.Equal(t, []string{"expire"}, kinds)
	require.Equal(t, []int64{120}, amounts)
}

// A hold that falls due in the instant in which its lot ends comes after that end: its units lapse.
func TestDueHolds_OfTheInstantOfAnEndComeAfterIt(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Ends: wallet.At(noon.Add(time.Hour)), Roll: &wallet.Roll{Cap: 10, Lasts: wallet.For(day)}})
	f.place("h", 4, time.Hour)
	f.clock.Advance(2 * time.Hour)
	require.EqualValues(t, 6, f.balance().Units)
	d := f.draw(1)
	require.EqualValues(t, 5, d.Left)
	f.verify()
}

// A sum has no units that fall due on both sides of the end of their lot: those before it roll over with it, and those
// from that instant on lapse.
func TestDueHolds_ASumEndsWithTheLotOfItsUnits(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 60, Reference: "a", Ends: wallet.At(noon.Add(90 * time.Minute)), Roll: &wallet.Roll{Cap: 100, Lasts: wallet.For(day)}})
	f.grant(wallet.Grant{Amount: 60, Reference: "b", Ends: wallet.At(noon.Add(90*time.Minute + time.Microsecond))})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
		for i := range 60 {
			r := holds.Placement{ID: fmt.Sprint(i), TTL: time.Hour + time.Duration(i)*time.Minute, Lines: []holds.Line{f.book.Line("ann", 2)}}
			if _, err := f.holds.Place(ctx, tx, r); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	require.NoError(t, err)
	f.clock.Advance(3 * time.Hour)
	before := f.balance()
	require.EqualValues(t, 60, before.Units) // the first 30 holds had units of a
	d, err := do(f, func(ctx context.Context, tx pgx.Tx) (wasDrawn, error) {
		return f.drawIn(ctx, tx, toDraw{Wallet: "ann", Amount: 1})
	})
	require.NoError(t, err)
	require.EqualValues(t, 59, d.Left)
	f.verify()
	require.EqualValues(t, 60, pgtest.Value[int64](t, f.pool, "select sum(lapsed) from metered.lot_rows where scope = 'ann' and reference = 'b'"))
}

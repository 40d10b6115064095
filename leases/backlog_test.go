package leases_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// A pool writes what is due in a scope in steps, as calls do that have a transaction of their own.
func TestAllow_GoesThroughABacklogOfMinima(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))
	book, err := holds.New(f.ledger, holds.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
		for n := range 60 {
			_, err := book.Place(t.Context(), tx, holds.Placement{ID: fmt.Sprint(n), TTL: time.Minute, Lines: []holds.Line{{Scope: "hot", Amount: 2, AtLeast: 1}}})
			require.NoError(t, err)
		}
		return nil
	}))
	clock.Advance(time.Hour)
	p := f.pool(leases.Rule{})
	require.NoError(t, p.Allow(t.Context(), charge(1, budget.Lifetime(61))))
	require.EqualValues(t, 61, f.usage("hot").Used)
	require.EqualValues(t, 61, f.settled("hot", p))
}

// Calls of a Carver in RunTx, and sweeps, go through minima that fell due in a child and in its parent. In a transaction that is lent they
// are busy.
func TestCarve_GoesThroughABacklogOfMinima(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	c := pgtest.NewClient(t, f.db, metered.Config{})
	minima := func(scopes ...string) {
		require.NoError(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			for n := range 60 {
				for _, scope := range scopes {
					_, err := f.book.Place(t.Context(), tx, holds.Placement{ID: fmt.Sprint(metered.NewID(), n), TTL: time.Minute,
						Lines: []holds.Line{{Scope: scope, Amount: 1, AtLeast: 1}}})
					require.NoError(t, err)
				}
			}
			return nil
		}))
		clock.Advance(2 * time.Minute)
	}
	for _, child := range []string{"ended", "swept"} {
		_, err := f.carve(pgx.ReadCommitted, child, "user", 200)
		require.NoError(t, err)
	}
	minima("user", "ended", "swept")
	_, err := f.close(pgx.ReadCommitted, "ended")
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		l, err := f.carver.End(ctx, tx, "ended", budget.Note{})
		if err == nil {
			require.EqualValues(t, 60, l.Spent)
		}
		return err
	}))
	minima("user")
	carve := func(ctx context.Context, tx pgx.Tx) error {
		_, err := f.carver.Carve(ctx, tx, leases.Carving{Child: "new", TTL: time.Hour,
			From: budget.Charge{Scope: "user", Amount: 10, Limits: []budget.Limit{budget.Prepaid(0)}}})
		return err
	}
	require.ErrorIs(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error { return carve(t.Context(), tx) }), budget.ErrBusy)
	require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, carve))
	clock.Advance(2 * time.Hour)
	report, err := leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Equal(t, leases.SweepReport{Settled: 2}, report)
	f.stands("user", 240, 0, 0)
}

// A child that is closed ends no more of its due holds at once than a step does. In a transaction that is lent it is busy, and RunTx and sweeps
// take steps before it.
func TestCarve_AClosedChildEndsDueHoldsInSteps(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	c := pgtest.NewClient(t, f.db, metered.Config{})
	_, err := f.db.Exec(t.Context(), "create or replace function metered._events_per_step() returns int language sql immutable as 'select 5'")
	require.NoError(t, err)
	least := map[string]int64{"ended": 1} // the other one captures nothing
	place := func(child string, ttl time.Duration, count int) {
		require.NoError(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			for n := range count {
				_, err := f.book.Place(t.Context(), tx, holds.Placement{ID: fmt.Sprint(child, ttl, n), TTL: ttl,
					Lines: []holds.Line{{Scope: child, Amount: 2, AtLeast: least[child] * int64(n%2)}}})
				require.NoError(t, err)
			}
			return nil
		}))
	}
	open := func(child string) (lines int) {
		require.NoError(t, f.db.QueryRow(t.Context(), "select count(*) from metered.hold_lines where scope = $1 and open > 0", child).Scan(&lines))
		return lines
	}
	end := func(child string) (l leases.Lease, err error) {
		return l, c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			l, err = f.carver.End(ctx, tx, child, budget.Note{})
			return err
		})
	}
	step := func(child string, most int) bool { // and how many lines it ends at most
		before, more := open(child), false
		require.NoError(t, f.db.QueryRow(t.Context(), "select metered.catch_up($1, 1000)", child).Scan(&more))
		require.LessOrEqual(t, before-open(child), most)
		return more
	}
	children := []string{"ended", "swept"}
	for _, child := range children {
		_, err := f.carve(pgx.ReadCommitted, child, "user", 200)
		require.NoError(t, err)
		place(child, time.Minute, 26) // 13 of them with a minimum
		place(child, time.Hour, 13)
	}
	clock.Advance(2 * time.Minute)
	for _, child := range children {
		l, err := end(child)
		require.NoError(t, err)
		require.Zero(t, l.SettledAt)
		require.Equal(t, 13, open(child), "those that are not due")
	}
	clock.Advance(2 * time.Hour)
	for _, child := range children {
		_, err = f.close(pgx.ReadCommitted, child)
		require.ErrorIs(t, err, budget.ErrBusy)
		require.Equal(t, 13, open(child))
		require.True(t, step(child, 5))
		require.Equal(t, 8, open(child))
	}
	l, err := end("ended")
	require.NoError(t, err)
	require.NotZero(t, l.SettledAt)
	require.EqualValues(t, 13+6, l.Spent)
	clock.Advance(400 * 24 * time.Hour)
	_, err = leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	l, err = f.carver.Get(t.Context(), f.db, "swept")
	require.NoError(t, err)
	require.NotZero(t, l.SettledAt)
	require.Zero(t, l.Spent)
}

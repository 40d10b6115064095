package budget_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

func repairClock(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, scope string) (r budget.ClockRepair, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err = l.RepairClock(ctx, tx, scope, budget.Note{Actor: "operator"})
		return err
	})
	return r, err
}

func TestClock_WithinTheToleranceEntriesAreDatedLikeTheLast(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	hourly := budget.Limit{Max: 10, Window: time.Hour}
	mustCharge(t, pool, l, "a", 1, hourly)
	clock.Advance(-time.Minute)
	posted := mustCharge(t, pool, l, "a", 1, hourly)
	require.WithinDuration(t, start, posted.At, 0)
	require.Equal(t, int64(2), usage(t, pool, l, "a", time.Hour).Used)
}

func TestClock_AheadBeyondTheToleranceFailsForWindowsOnly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	hourly, total := budget.Limit{Max: 10, Window: time.Hour}, budget.Lifetime(10)
	mustCharge(t, pool, l, "a", 1, hourly)
	clock.Advance(-time.Minute - time.Microsecond)

	_, err := charge(ctx, pool, l, "a", 1, total, hourly)
	require.ErrorIs(t, err, budget.ErrClock)
	var clockErr *budget.ClockError
	require.ErrorAs(t, err, &clockErr)
	require.Equal(t, "a", clockErr.Scope)
	require.Equal(t, time.Minute+time.Microsecond, clockErr.Ahead)
	require.Equal(t, "budget_clock", clockErr.Code())
	_, err = l.Check(ctx, pool, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{hourly}})
	require.ErrorIs(t, err, budget.ErrClock)

	posted := mustCharge(t, pool, l, "a", 1, total)
	require.WithinDuration(t, start, posted.At, 0, "an entry is never dated before the last one")
	mustCredit(t, pool, l, "a", 1)
	require.NoError(t, refund(ctx, pool, l, "a", 1, 1))
	requireVerified(t, pool, l)
}

func TestClock_RepairLetsChargesPassAndNothingLeaveEarly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	hourly := budget.Limit{Max: 10, Window: time.Hour}
	for range 20 {
		mustCharge(t, pool, l, "a", 1)
		clock.Advance(time.Minute)
	}
	clock.Set(start.Add(5 * time.Hour)) // the clock is wrong
	mustCharge(t, pool, l, "a", 3)
	clock.Set(start.Add(40 * time.Minute)) // and right again
	require.Equal(t, int64(3), usage(t, pool, l, "a", time.Hour).Used, "until the repair, the wrong time rules")

	r, err := repairClock(ctx, pool, l, "a")
	require.NoError(t, err)
	require.True(t, r.Repaired)
	require.Equal(t, int64(22), r.Seq)
	require.WithinDuration(t, clock.Now(), r.At, 0)
	require.Equal(t, 4*time.Hour+20*time.Minute, r.Ahead)

	// What was dated into the future counts from the repair; all others as ever.
	require.Equal(t, int64(23), usage(t, pool, l, "a", time.Hour).Used)
	_, err = charge(ctx, pool, l, "a", 1, hourly)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, int64(23), exceeded.Refusals[0].Used)
	require.Equal(t, 33*time.Minute, exceeded.RetryAfter(), "14 must go: the one of 0:13 leaves at 1:13")
	clock.Set(start.Add(time.Hour + 40*time.Minute - time.Microsecond))
	require.Equal(t, int64(3), usage(t, pool, l, "a", time.Hour).Used)
	clock.Advance(time.Microsecond)
	require.Zero(t, usage(t, pool, l, "a", time.Hour).Used)
	mustCharge(t, pool, l, "a", 10, hourly)

	again, err := repairClock(ctx, pool, l, "a")
	require.NoError(t, err)
	require.Equal(t, budget.ClockRepair{At: again.At}, again)
	require.Equal(t, int64(23), usage(t, pool, l, "a", 0).Seq)
	requireVerified(t, pool, l)
}

func TestClock_RepairOfAnEmptyScopeDoesNothing(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	r, err := repairClock(t.Context(), pool, l, "a")
	require.NoError(t, err)
	require.Equal(t, budget.ClockRepair{At: r.At}, r)
	require.Zero(t, usage(t, pool, l, "a", 0).Seq)
}

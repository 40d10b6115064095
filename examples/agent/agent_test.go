package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func openOffice(t *testing.T, at time.Time) (*office, *pgtest.Clock) {
	t.Helper()
	pool := exampletest.Open(t, callsSQL)
	o, err := newOffice(pool)
	require.NoError(t, err)
	return o, pgtest.SetClock(t, pool, at)
}

var may = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

// stands checks the user's spent and free units, the calls on record, and all sums of the ledger.
func (o *office) stands(t *testing.T, used, left, calls int64) {
	t.Helper()
	gotUsed, gotLeft, err := o.left(t.Context(), "ann")
	require.NoError(t, err)
	made := pgtest.Value[int64](t, o.db, `select coalesce(sum(units), 0)::bigint from calls`)
	require.Equal(t, []int64{used, left, calls}, []int64{gotUsed, gotLeft, made}, "used, left, units of calls")
	pgtest.RequireVerified(t, o.db, o.client.Budget)
}

func TestWork_AgentsSpendAtOnceAndUnusedUnitsGoBack(t *testing.T) {
	t.Parallel()
	o, _ := openOffice(t, may)
	lease, err := o.work(t.Context(), "ann", "1", 600, time.Hour, func(ctx context.Context, r *run) error {
		o.stands(t, 0, 400, 0)
		var made atomic.Int64
		err := pgtest.InParallel(3, func(i int) error {
			lease, err := r.sub(ctx, fmt.Sprint(i), 150, time.Hour, func(ctx context.Context, agent *run) error {
				n, refused, err := agent.callAtOnce(ctx, 25, 7)
				made.Add(int64(n))
				require.Equal(t, 25-21, refused)
				return err
			})
			require.Equal(t, int64(147), lease.Spent)
			require.NotZero(t, lease.SettledAt)
			return err
		})
		require.NoError(t, err)
		require.Equal(t, int64(3*21), made.Load())
		o.stands(t, 0, 400, 441)

		left, _, err := r.call(ctx, "rest", "think", 100)
		require.NoError(t, err)
		require.Equal(t, int64(600-441-100), left)
		_, _, err = r.call(ctx, "more", "think", 60)
		require.ErrorIs(t, err, budget.ErrExceeded)
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, int64(541), lease.Spent)
	o.stands(t, 541, 459, 541)
}

// A run's budget ends with the run, in each way that a run can end.
func TestWork_FailedAndCancelledRunsGiveUnusedUnitsBack(t *testing.T) {
	t.Parallel()
	o, _ := openOffice(t, may)
	failure := errors.New("no answer")
	var late *run
	ctx, cancel := context.WithCancel(t.Context())
	_, err := o.work(ctx, "ann", "1", 900, time.Hour, func(ctx context.Context, r *run) error {
		_, err := r.sub(ctx, "agent", 500, time.Hour, func(ctx context.Context, agent *run) error {
			late = agent
			_, _, err := agent.call(ctx, "one", "search", 11)
			cancel()
			return errors.Join(err, failure)
		})
		return err
	})
	require.ErrorIs(t, err, failure)
	o.stands(t, 11, 989, 11)
	_, _, err = late.call(t.Context(), "two", "search", 1)
	require.ErrorIs(t, err, budget.ErrScopeClosed)

	_, err = o.work(t.Context(), "ann", "2", 990, time.Hour, nil)
	require.ErrorIs(t, err, budget.ErrExceeded, "and more than there is, is not given")
	o.stands(t, 11, 989, 11)
}

// Nobody ends a run and its agent. At the run's deadline, and not before, all units go back except those that calls on
// record have used.
func TestSweep_OfAnAbandonedRunGivesUnusedUnitsBack(t *testing.T) {
	t.Parallel()
	o, clock := openOffice(t, may)
	require.NoError(t, o.abandon(t.Context(), "ann", "1", 900, time.Hour))
	clock.Advance(time.Hour - time.Microsecond)
	report, err := leases.Sweep(t.Context(), o.db, o.client.Budget)
	require.NoError(t, err)
	require.Equal(t, leases.SweepReport{}, report, "not before its time")
	o.stands(t, 0, 100, 15)
	clock.Advance(time.Microsecond)
	report, err = leases.Sweep(t.Context(), o.db, o.client.Budget)
	require.NoError(t, err)
	require.Equal(t, 2, report.Settled)
	o.stands(t, 15, 985, 15)
}

// A run's spending counts in the month in which the run ends.
func TestWork_OverTheEndOfAMonth(t *testing.T) {
	t.Parallel()
	o, clock := openOffice(t, time.Date(2026, 5, 31, 23, 0, 0, 0, time.UTC))
	_, err := o.work(t.Context(), "ann", "1", 800, 2*time.Hour, func(ctx context.Context, r *run) error {
		_, _, err := r.call(ctx, "in May", "search", 300)
		require.NoError(t, err)
		clock.Advance(time.Hour)
		o.stands(t, 0, 200, 300)
		_, _, err = r.call(ctx, "in June", "search", 400)
		return err
	})
	require.NoError(t, err)
	o.stands(t, 700, 300, 700)
}

// The program is run as a user would.
func TestAgent(t *testing.T) {
	t.Parallel()
	program := exampletest.New(t)
	program.Prints(
		`agent-1: 25 calls made, 15 refused`,
		`agent-2 used 50 of 250`,
		`summary: replayed: true`,
		`run 43: refused, 400 of the month are free`,
		`ann: 320 used this month, 680 left`,
		`ann: 335 used this month, 665 left`,
		`entries: 0 differences`,
	)
}

package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func gatedCommand(c *metered.Client, id string, opts *jobs.Options, charges ...budget.Charge) (jobs.Result, error) {
	out, err := metered.Do(context.Background(), c, metered.Command{ID: id, Input: id, Charges: charges}, func(ctx context.Context, tx *metered.Tx) (jobs.Result, error) {
		return tx.Enqueue(ctx, pgtest.Process{Name: "job"}, opts)
	})
	return out.Result, err
}

// A job whose units do not fit commits with its command, and is parked. One that fits starts.
func TestDo_GatedJobsStartOrAreParkedWithTheCommand(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	opts := func(key string) *jobs.Options {
		return &jobs.Options{Key: key, Tenant: "acme", MaxParked: 1, Hold: &jobs.Units{Lines: []holds.Line{pgtest.Room("gpu", 1, 1)}}}
	}
	first, err := gatedCommand(c, "a", opts("a"))
	require.NoError(t, err)
	require.Equal(t, jobs.Result{JobID: first.JobID, Created: true}, first)
	require.Equal(t, 1, pgtest.Count(t, pool, "river_job"))

	second, err := gatedCommand(c, "b", opts("b"), pgtest.Charge("money", 5, 100))
	require.NoError(t, err)
	require.Equal(t, 1, pgtest.Count(t, pool, "river_job"))
	require.Equal(t, 1, pgtest.Count(t, pool, "metered.parked_jobs"))
	require.EqualValues(t, 5, pgtest.Used(t, pool, c, "money"))
	again, err := gatedCommand(c, "b", opts("b"), pgtest.Charge("money", 5, 100))
	require.NoError(t, err)
	require.Equal(t, second, again, "the command is a replay")
	known, err := gatedCommand(c, "other", opts("b"))
	require.NoError(t, err)
	require.Equal(t, jobs.Result{JobID: second.JobID}, known)

	// The line is full: the command did nothing.
	_, err = gatedCommand(c, "c", opts("c"), pgtest.Charge("money", 5, 100))
	require.ErrorIs(t, err, jobs.ErrFull)
	require.Equal(t, "jobs_full", metered.Code(err))
	require.EqualValues(t, 5, pgtest.Used(t, pool, c, "money"))
	require.Equal(t, 2, pgtest.Count(t, pool, "metered.job_keys"))

	// It never fits: so does the command.
	never := &jobs.Options{Hold: &jobs.Units{Lines: []holds.Line{{Scope: "gpu", Amount: 9, Limits: []budget.Limit{budget.PerWindow(1, time.Minute)}}}}}
	_, err = gatedCommand(c, "d", never)
	require.ErrorIs(t, err, budget.ErrExceeded)

	// A command that frees the units marks the line, and its commit lets the job start.
	_, err = metered.Do(context.Background(), c, metered.Command{ID: "free", Input: 1}, func(_ context.Context, tx *metered.Tx) (int, error) {
		return 0, tx.Release(holds.Release{Tenant: "acme", IDs: []string{pgtest.Value[string](t, pool, "select metadata ->> 'metered:hold' from river_job")}})
	})
	require.NoError(t, err)
	report, err := c.Jobs.Release(context.Background(), pool)
	require.NoError(t, err)
	require.EqualValues(t, 1, report.Released)
	require.Equal(t, 2, pgtest.Count(t, pool, "river_job"))
	pgtest.RequireVerified(t, pool, c.Budget)
}

func TestDoTx_GatedJobIsRolledBackWithItsTransaction(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	opts := &jobs.Options{Hold: &jobs.Units{Lines: []holds.Line{pgtest.Room("gpu", 1, 1)}}}
	for range 2 {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		for _, id := range []string{"a", "b"} {
			_, err = metered.DoTx(t.Context(), c, tx, metered.Command{ID: id, Input: id}, func(ctx context.Context, tx *metered.Tx) (jobs.Result, error) {
				return tx.Enqueue(ctx, pgtest.Process{Name: id}, opts)
			})
			require.NoError(t, err)
		}
		var started, parked int
		require.NoError(t, tx.QueryRow(t.Context(), "select (select count(*) from river_job), (select count(*) from metered.parked_jobs)").Scan(&started, &parked))
		require.Equal(t, [2]int{1, 1}, [2]int{started, parked})
		require.NoError(t, tx.Rollback(context.Background()))
	}
	require.Zero(t, pgtest.Count(t, pool, "river_job")+pgtest.Count(t, pool, "metered.parked_jobs")+pgtest.Count(t, pool, "metered.parked_scopes"))
}

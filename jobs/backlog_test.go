package jobs_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// minimaDue are 60 holds of a scope, with a minimum of 1 each, which fall due in 10 seconds.
func minimaDue(t *testing.T, pool *pgxpool.Pool, book *holds.Book, scope string) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for n := range 60 {
			_, err := book.Place(t.Context(), tx, holds.Placement{ID: fmt.Sprint(scope, n), TTL: 10 * time.Second,
				Lines: []holds.Line{{Scope: scope, Amount: 1, AtLeast: 1}}})
			require.NoError(t, err)
		}
		return nil
	}))
}

// A releaser writes minima that fell due, and then starts the job.
func TestRelease_GoesThroughABacklogOfMinima(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	minimaDue(t, g.pool, g.book, "gpu")
	most := budget.PerWindow(100, time.Minute)
	waits := g.mustEnqueue(process{"a"}, needs(holds.Line{Scope: "gpu", Amount: 50, Limits: []budget.Limit{most}}))
	require.True(t, waits.Parked)
	clock.Advance(11 * time.Second)
	require.Zero(t, g.release().Released, "the minima are of this minute")
	clock.Advance(2 * time.Minute)
	report := g.release()
	require.EqualValues(t, 1, report.Released, "%+v", report)
	spent, held := g.used("gpu")
	require.Equal(t, []int64{60, 50}, []int64{spent, held})
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// A worker captures what a job used in a scope with minima that fell due, or releases its hold: the work is not done again.
func TestHeldWorker_GoesThroughABacklogOfMinima(t *testing.T) {
	t.Parallel()
	for _, nothing := range []bool{false, true} {
		pool, c := setUp(t, metered.Config{})
		clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(9))
		minimaDue(t, pool, c.Holds, "gpu")
		job := submit(t, c, 1)
		clock.Advance(11 * time.Second)
		work := costs(7, holds.OverRefused)
		if nothing {
			work = func(context.Context, *rendering) (jobs.JobCost, error) { return jobs.JobCost{Nothing: true}, nil }
		}
		workHeld(t, pool, c, jobs.WorkerOptions{}, work)
		awaitJob(t, pool, job, "completed")
		require.EqualValues(t, map[bool]int64{false: 67, true: 60}[nothing], booksOf(t, pool, c, job).Spent)
	}
}

package jobs_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
)

func TestWorkers_NilIsRefused(t *testing.T) {
	t.Parallel()
	pool, book := new(pgxpool.Pool), new(holds.Book)
	work := func(context.Context, *river.Job[Transcribe]) (jobs.JobCost, error) {
		return jobs.JobCost{}, nil
	}
	held, cleanup := &river.Job[Transcribe]{JobRow: &rivertype.JobRow{}}, &river.Job[jobs.CleanupArgs]{JobRow: &rivertype.JobRow{}}
	refused := func(field string, err error) {
		t.Helper()
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
		require.Equal(t, field, argument.Field)
	}
	refused("pool", jobs.NewWorker(nil, book, work, jobs.WorkerOptions{}).Work(t.Context(), held))
	refused("book", jobs.NewWorker(pool, nil, work, jobs.WorkerOptions{}).Work(t.Context(), held))
	refused("book", jobs.NewWorker(pool, book, work, jobs.WorkerOptions{}).Work(t.Context(), held))
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err = holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	refused("work", jobs.NewWorker[Transcribe](pool, book, nil, jobs.WorkerOptions{}).Work(t.Context(), held))
	refused("pool", jobs.NewCleanupWorker(nil, book).Work(t.Context(), cleanup))
	refused("book", jobs.NewCleanupWorker(pool, nil).Work(t.Context(), cleanup))
	refused("book", jobs.NewCleanupWorker(pool, new(holds.Book)).Work(t.Context(), cleanup))
}

package holdjobs_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/holds/holdjobs"
)

func TestWorkers_NilIsRefused(t *testing.T) {
	t.Parallel()
	pool, book := new(pgxpool.Pool), new(holds.Book)
	work := func(context.Context, *river.Job[Transcribe]) (holdjobs.JobCost, error) {
		return holdjobs.JobCost{}, nil
	}
	held, cleanup := &river.Job[Transcribe]{JobRow: &rivertype.JobRow{}}, &river.Job[holdjobs.CleanupArgs]{JobRow: &rivertype.JobRow{}}
	refused := func(field string, err error) {
		t.Helper()
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
		require.Equal(t, field, argument.Field)
	}
	refused("pool", holdjobs.NewWorker(nil, book, work, holdjobs.Options{}).Work(t.Context(), held))
	refused("book", holdjobs.NewWorker(pool, nil, work, holdjobs.Options{}).Work(t.Context(), held))
	refused("book", holdjobs.NewWorker(pool, book, work, holdjobs.Options{}).Work(t.Context(), held))
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err = holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	refused("work", holdjobs.NewWorker[Transcribe](pool, book, nil, holdjobs.Options{}).Work(t.Context(), held))
	refused("pool", holdjobs.NewCleanupWorker(nil, book).Work(t.Context(), cleanup))
	refused("book", holdjobs.NewCleanupWorker(pool, nil).Work(t.Context(), cleanup))
	refused("book", holdjobs.NewCleanupWorker(pool, new(holds.Book)).Work(t.Context(), cleanup))
}

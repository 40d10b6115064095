package jobs_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// withHook opens a database with a client that has a hook of the user's before and
// after the plugin.
func withHook(t *testing.T, hook river.HookInsertBeginFunc) *fixture {
	return on(t, pgtest.Open(t), jobs.Config{}, &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()},
		Hooks:   []rivertype.Hook{hook},
	})
}

func TestPlugin_MissingIsAnErrorAndLeavesNothing(t *testing.T) {
	t.Parallel()
	f := on(t, pgtest.Open(t), jobs.Config{}, &river.Config{})

	tx := f.begin(pgx.ReadCommitted)
	_, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
	require.ErrorIs(t, err, fault.New("job_plugin", ""))
	require.Equal(t, "job_plugin", metered.Code(err))
	requireAborted(t, tx)
	f.requireCounts(0, 0)

	_, err = f.enqueue(process{"a"}, &jobs.Options{Tenant: "acme"})
	require.NoError(t, err, "without a key it is not needed")
	f.requireCounts(1, 0)
}

func TestPlugin_TwiceDoesNoHarm(t *testing.T) {
	t.Parallel()
	f := on(t, pgtest.Open(t), jobs.Config{}, &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin(), jobs.Plugin()},
	})
	f.mustEnqueue(process{"a"}, key("k"))
	f.requireCounts(1, 1)
}

func TestPlugin_LeavesOtherInsertsAlone(t *testing.T) {
	t.Parallel()
	var f *fixture
	var inner *rivertype.JobInsertResult
	f = withHook(t, func(ctx context.Context, params *rivertype.JobInsertParams) error {
		if params.Kind != "process" {
			return nil
		}
		// A hook that inserts a job of its own, with the same context.
		var err error
		inner, err = f.client.Insert(ctx, discard{"audit"}, nil)
		return err
	})
	result := f.mustEnqueue(process{"a"}, key("k"))
	require.NotEqual(t, inner.Job.ID, result.JobID)
	require.Equal(t, "discard", f.job(inner.Job.ID).Kind)
	require.Equal(t, "process", f.job(result.JobID).Kind)
}

func TestPlugin_HooksMayChangeArgsAndAddMetadata(t *testing.T) {
	t.Parallel()
	f := withHook(t, func(_ context.Context, params *rivertype.JobInsertParams) error {
		params.EncodedArgs = []byte(`{"asset": "sealed"}`)
		params.Metadata = bytes.Replace(params.Metadata, []byte("{"), []byte(`{"trace": "t-1",`), 1)
		return nil
	})
	first := f.mustEnqueue(process{"a"}, key("k"))
	require.JSONEq(t, `{"asset": "sealed"}`, string(f.job(first.JobID).EncodedArgs))
	require.Equal(t, jobs.Result{JobID: first.JobID}, f.mustEnqueue(process{"a"}, key("k")))
	_, err := f.enqueue(process{"b"}, key("k"))
	require.ErrorIs(t, err, jobs.ErrConflict)
}

func TestPlugin_HookThatChangesTheIdIsAnError(t *testing.T) {
	t.Parallel()
	f := withHook(t, func(_ context.Context, params *rivertype.JobInsertParams) error {
		params.ID = nil
		return nil
	})
	_, err := f.enqueue(process{"a"}, key("k"))
	require.ErrorIs(t, err, fault.New("job_plugin", ""))
	f.requireCounts(0, 0)
}

func TestEnqueue_KeyCannotBeCommittedWithoutItsJob(t *testing.T) {
	t.Parallel()
	errHook := errors.New("no")
	var panics bool
	f := withHook(t, func(context.Context, *rivertype.JobInsertParams) error {
		if panics {
			panic(errHook)
		}
		return errHook
	})

	tx := f.begin(pgx.ReadCommitted)
	_, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
	require.ErrorIs(t, err, errHook)
	requireAborted(t, tx)

	panics = true
	tx = f.begin(pgx.ReadCommitted)
	require.PanicsWithValue(t, errHook, func() { _, _ = f.Enqueue(f.ctx, tx, process{"a"}, key("k")) })
	requireAborted(t, tx)

	// The same when ctx was cancelled in between.
	panics = false
	ctx, cancel := context.WithCancel(f.ctx)
	g := withHook(t, func(context.Context, *rivertype.JobInsertParams) error {
		cancel()
		return errHook
	})
	tx = g.begin(pgx.ReadCommitted)
	_, err = g.Enqueue(ctx, tx, process{"a"}, key("k"))
	require.ErrorIs(t, err, errHook)
	requireAborted(t, tx)

	// A kind that the client has no worker for is River's error, and comes late.
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(context.Context, *river.Job[discard]) error { return nil }))
	h := on(t, f.pool, jobs.Config{}, &river.Config{Workers: workers, Plugins: []rivertype.Plugin{jobs.Plugin()}})
	tx = h.begin(pgx.ReadCommitted)
	_, err = h.Enqueue(h.ctx, tx, process{"a"}, key("k"))
	var unknown *river.UnknownJobKindError
	require.ErrorAs(t, err, &unknown)
	requireAborted(t, tx)
	f.requireCounts(0, 0)
	g.requireCounts(0, 0)
}

func TestEnqueue_HookErrorWithANewSavepointLeavesTheRest(t *testing.T) {
	t.Parallel()
	f := withHook(t, func(_ context.Context, params *rivertype.JobInsertParams) error {
		if params.Kind == "process" {
			return errors.New("no")
		}
		return nil
	})
	tx := f.begin(pgx.ReadCommitted)
	_, err := f.Enqueue(f.ctx, tx, discard{"kept"}, key("kept"))
	require.NoError(t, err)
	require.Error(t, pgx.BeginFunc(f.ctx, tx, func(savepoint pgx.Tx) error {
		_, err := f.Enqueue(f.ctx, savepoint, process{"a"}, key("k"))
		return err
	}))
	require.NoError(t, tx.Commit(f.ctx))
	f.requireCounts(1, 1)
}

func TestEnqueue_MiddlewareThatReturnsAnotherNumberOfJobsIsAnError(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func([]*rivertype.JobInsertResult) []*rivertype.JobInsertResult{
		"none":     func([]*rivertype.JobInsertResult) []*rivertype.JobInsertResult { return nil },
		"one more": func(rows []*rivertype.JobInsertResult) []*rivertype.JobInsertResult { return append(rows, rows[0]) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := on(t, pgtest.Open(t), jobs.Config{}, &river.Config{
				Plugins: []rivertype.Plugin{jobs.Plugin()},
				Middleware: []rivertype.Middleware{river.JobInsertMiddlewareFunc(func(ctx context.Context,
					_ []*rivertype.JobInsertParams, doInner func(context.Context) ([]*rivertype.JobInsertResult, error),
				) ([]*rivertype.JobInsertResult, error) {
					rows, err := doInner(ctx)
					return change(rows), err
				})},
			})
			tx := f.begin(pgx.ReadCommitted)
			_, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
			require.ErrorContains(t, err, "middleware")
			requireAborted(t, tx)
			f.requireCounts(0, 0)
		})
	}
}

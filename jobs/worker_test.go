package jobs_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestEnqueue_RealWorkersRunTheEnqueuedJobs(t *testing.T) {
	t.Parallel()
	type seen struct {
		id                 int64
		asset, tenant, key string
	}
	worked := make(chan seen, 10)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[process]) error {
		worked <- seen{job.ID, job.Args.Asset, jobs.Of(job.JobRow).Tenant, jobs.Of(job.JobRow).Key}
		return nil
	}))
	// The kind was seen by River with its worker, so hooks of the args themselves
	// would have come too late: the plugin must do without.
	f := on(t, pgtest.Open(t), jobs.Config{}, &river.Config{
		Plugins:           []rivertype.Plugin{jobs.Plugin()},
		Workers:           workers,
		Queues:            map[string]river.QueueConfig{"default": {MaxWorkers: 5}, "media": {MaxWorkers: 5}},
		FetchCooldown:     10 * time.Millisecond,
		FetchPollInterval: 50 * time.Millisecond,
		PollOnly:          true,
	})
	require.NoError(t, f.client.Start(f.ctx))
	t.Cleanup(func() { require.NoError(t, f.client.Stop(context.Background())) })

	keyed := f.mustEnqueue(process{"keyed"}, &jobs.Options{Key: "k", Tenant: "acme"})
	keyless := f.mustEnqueue(process{"keyless"}, &jobs.Options{Tenant: "zeta"})
	var bulk []jobs.Result
	require.NoError(t, pgx.BeginFunc(f.ctx, f.pool, func(tx pgx.Tx) (err error) {
		bulk, err = f.EnqueueMany(f.ctx, tx, []jobs.Item{
			{Args: process{"bulk keyed"}, Options: &jobs.Options{Key: "b", InsertOpts: river.InsertOpts{Queue: "media"}}},
			{Args: process{"bulk keyless"}},
			{Args: process{"keyed"}, Options: &jobs.Options{Key: "k", Tenant: "acme"}},
		})
		return err
	}))
	want := map[seen]bool{
		{keyed.JobID, "keyed", "acme", "k"}:     true,
		{keyless.JobID, "keyless", "zeta", ""}:  true,
		{bulk[0].JobID, "bulk keyed", "", "b"}:  true,
		{bulk[1].JobID, "bulk keyless", "", ""}: true,
	}
	for range 4 {
		select {
		case s := <-worked:
			require.True(t, want[s], "%+v, or a second time", s)
			delete(want, s)
		case <-time.After(time.Until(pgtest.Patience(t))):
			require.Fail(t, "not worked", "%+v", want)
		}
	}

	// Done is not forgotten.
	pgtest.WaitFor(t, "the job to be completed", func() bool { return f.job(keyed.JobID).State == rivertype.JobStateCompleted })
	require.Equal(t, jobs.Result{JobID: keyed.JobID}, f.mustEnqueue(process{"keyed"}, &jobs.Options{Key: "k", Tenant: "acme"}))
	f.requireCounts(4, 2)
}

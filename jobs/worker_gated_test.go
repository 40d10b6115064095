package jobs_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// draw is a job that names no hold.
type draw struct {
	Fails bool `json:"fails"`
}

func (draw) Kind() string { return "draw" }

// park enqueues a job of a command, with 10 units of "gpu" for its cost.
func park(t *testing.T, c *metered.Client, args draw, most int64, ttl time.Duration) (jobID int64) {
	t.Helper()
	_, err := metered.Do(t.Context(), c, metered.Command{ID: metered.NewID(), Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		r, err := tx.Enqueue(ctx, args, &jobs.Options{
			Tenant: "acme", InsertOpts: river.InsertOpts{MaxAttempts: 1}, Hold: &jobs.Units{TTL: ttl, Lines: []holds.Line{room("gpu", 10, most)}},
		})
		jobID = r.JobID
		return nil, err
	})
	require.NoError(t, err)
	return jobID
}

func workDraws(t *testing.T, pool *pgxpool.Pool, c *metered.Client, cost int64) *river.Client[pgx.Tx] {
	t.Helper()
	workers := river.NewWorkers()
	river.AddWorker(workers, jobs.NewWorker(pool, c.Holds, func(_ context.Context, job *river.Job[draw]) (jobs.JobCost, error) {
		if job.Args.Fails {
			return jobs.JobCost{}, errors.New("no")
		}
		return jobs.JobCost{Lines: []holds.Line{{Scope: "gpu", Amount: cost}}}, nil
	}, jobs.WorkerOptions{}))
	return startWorkers(t, pool, workers)
}

// The cost of a job is charged with its end, which lets the next job start: those that fit are worked, and the rest waits.
func TestHeldWorker_ChargesAGatedJobItsCostAndItsEndStartsTheNext(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	fails := park(t, c, draw{Fails: true}, 19, 0)
	all := []int64{park(t, c, draw{}, 19, 0), park(t, c, draw{}, 19, 0), park(t, c, draw{}, 19, 0), park(t, c, draw{}, 19, 0)}
	require.Equal(t, 4, pgtest.Count(t, pool, "metered.parked_jobs"))
	workDraws(t, pool, c, 4)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Jobs.Run(ctx, pool, func(err error) { t.Error(err) }) }()
	// 4 and 4 and 4 are charged, and 10 more do not fit into 19.
	for _, id := range all[:3] {
		pgtest.WaitFor(t, "the job starts", func() bool {
			return pgtest.Value[int](t, pool, "select count(*) from river_job where id = $1", id) == 1
		})
		awaitJob(t, pool, id, "completed")
	}
	awaitJob(t, pool, fails, "discarded")
	stop()
	require.ErrorIs(t, <-done, context.Canceled)
	report, err := c.Jobs.Release(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{}, report, "no hold was left to be ended")
	p, err := c.Jobs.Explain(t.Context(), pool, all[3])
	require.NoError(t, err)
	require.Contains(t, p.Refused[0], "12 used, 0 held, 10 wanted")
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "gpu"})
	require.NoError(t, err)
	require.Equal(t, []int64{12, 0}, []int64{usage[0].Spent, usage[0].Held})
	pgtest.RequireVerified(t, pool, c.Budget)
}

// The worker dies. Its hold lasts until River gives the job to another, however late, which charges it once. With a TTL, the units
// are free by then, and the job is cancelled.
func TestHeldWorker_AGatedJobOfADeadWorkerKeepsItsUnits(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	id, brief := park(t, c, draw{}, 100, 0), park(t, c, draw{}, 100, time.Minute)
	_, err := pool.Exec(t.Context(), "update river_job set state = 'running', attempt = 1")
	require.NoError(t, err)
	pgtest.SetClock(t, pool, time.Now().Add(48*time.Hour))
	report, err := c.Jobs.Release(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{}, report)
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "gpu"})
	require.NoError(t, err)
	require.EqualValues(t, 10, usage[0].Held)
	_, err = pool.Exec(t.Context(), "update river_job set state = 'available', max_attempts = 9") // as River's rescuer does
	require.NoError(t, err)
	workDraws(t, pool, c, 7)
	awaitJob(t, pool, id, "completed")
	awaitJob(t, pool, brief, "cancelled")
	usage, err = c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "gpu"})
	require.NoError(t, err)
	require.Equal(t, []int64{7, 0}, []int64{usage[0].Spent, usage[0].Held})
	pgtest.RequireVerified(t, pool, c.Budget)
}

// A job without a hold cannot be charged.
func TestHeldWorker_CancelsAJobWithoutAHold(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	var id int64
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		r, err := c.Jobs.Enqueue(t.Context(), tx, draw{}, nil)
		id = r.JobID
		return err
	}))
	workDraws(t, pool, c, 7)
	awaitJob(t, pool, id, "cancelled")
}

package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/jobs/citusjobs"
)

// complaints are what River logs at WARN and above, and other errors of the background.
type complaints struct {
	mu    sync.Mutex
	texts []string
}

func (c *complaints) Write(line []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.texts = append(c.texts, string(line))
	return len(line), nil
}

func (c *complaints) all() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.texts, "")
}

// citusRiver is a client of River that works the jobs of schema metered through one node.
type citusRiver struct {
	*river.Client[pgx.Tx]
	c          *metered.Client
	pool       *pgxpool.Pool
	complaints complaints
	worked     atomic.Int64
}

func (c *citus) river(node string, pool *pgxpool.Pool, pollOnly bool) *citusRiver {
	t := c.t
	r := &citusRiver{pool: pool}
	ledger, err := budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[plainJob]) error {
		r.worked.Add(1)
		return fails(job.Args.N, job.Attempt)
	}))
	river.AddWorker(workers, jobs.NewWorker(pool, book, func(_ context.Context, job *river.Job[costedJob]) (jobs.JobCost, error) {
		r.worked.Add(1)
		return jobs.JobCost{Lines: []holds.Line{{Scope: "tokens", Amount: job.Args.cost()}}, Write: func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "insert into metered.uploads (name) values ($1)", fmt.Sprint(job.Args.N))
			return err
		}}, fails(job.Args.N, job.Attempt)
	}, jobs.WorkerOptions{Timeout: 30 * time.Second, RetryAfter: 300 * time.Millisecond}))
	r.Client, err = river.NewClient(citusjobs.New(pool), &river.Config{
		ID: node, Schema: "metered", PollOnly: pollOnly, Workers: workers, Plugins: []rivertype.Plugin{jobs.Plugin()},
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 100 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(&r.complaints, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	require.NoError(t, err)
	r.c, err = metered.New(pool, metered.Config{River: r.Client, Config: budget.Config{LockTimeout: time.Minute}})
	require.NoError(t, err)
	return r
}

// Workers on all nodes work jobs that were enqueued through all nodes. Some wait for budget, fail at first, give their units back meanwhile, or charge
// their actual cost. The slots are never exceeded, and the sums are exact.
func TestCitus_RiverWorksJobsOfEachNode(t *testing.T) {
	t.Parallel()
	const total = 30
	c := onCitus(t, citusCluster).migrated()
	all := map[string]*citusRiver{}
	var running sync.WaitGroup
	ctx, stop := context.WithTimeout(t.Context(), 8*time.Minute)
	defer stop()
	for node, pool := range c.nodes {
		r := c.river(node, pool, node == "other")
		all[node] = r
		require.NoError(t, r.Start(ctx))
		running.Go(func() {
			err := r.c.Jobs.Run(ctx, pool, func(err error) { fmt.Fprintln(&r.complaints, "Run:", err) })
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	for w, node := range citusNodes {
		running.Go(func() {
			for n := w; n < total; n += 3 {
				if err := (&system{c: all[node].c, pool: c.nodes[node]}).enqueueGated(ctx, n, time.Minute); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	number := func(sql string) int64 { return pgtest.Value[int64](t, c.owner, sql) }
	for n := range int64(total) {
		pgtest.WaitFor(t, "one more job", func() bool {
			for node, r := range all {
				require.Empty(t, r.complaints.all(), node)
			}
			return number("select count(*) from metered.river_job where state = 'completed'") > n
		})
	}
	pgtest.WaitFor(t, "the holds of jobs", func() bool { return number("select count(*) from metered.holds where pending") == 0 })
	for node, r := range all {
		require.NoError(t, r.Stop(ctx))
		require.NotZero(t, r.worked.Load(), node)
		require.Empty(t, r.complaints.all(), node)
		t.Logf("%s worked %d", node, r.worked.Load())
	}
	stop()
	running.Wait()
	require.Zero(t, number("select count(*) from metered.parked_jobs"))
	require.EqualValues(t, total, number("select count(*) from metered.river_job"))
	require.LessOrEqual(t, number("select max(spent + held) from metered.ledger where scope = 'slots'"), int64(slotsOfAll))
	require.EqualValues(t, 1, number("select max(spent + held) from metered.ledger where scope = 'own'"))
	require.NotZero(t, number("select count(*) from metered.hold_events where note ->> 'reason' = 'the job waits for its next attempt'"))
	var tokens int64
	for n := 0; n < total; n += 2 {
		tokens += costedJob{n}.cost()
	}
	usage, err := all["home"].c.Budget.Usage(t.Context(), c.owner, budget.Query{Scope: "slots"}, budget.Query{Scope: "calls"}, budget.Query{Scope: "tokens"})
	require.NoError(t, err)
	require.Equal(t, []int64{0, total / 2 * 3, tokens}, []int64{usage[0].Spent, usage[1].Spent, usage[2].Spent})
	require.Zero(t, usage[0].Held+usage[1].Held+usage[2].Held)
	require.EqualValues(t, total/2, number("select count(*) from metered.uploads"))
	pgtest.RequireVerified(t, c.owner, all["home"].c.Budget)
}

// Each call of River's own works through each node.
func TestCitus_RiversCallsThroughEachNode(t *testing.T) {
	t.Parallel()
	c := onCitus(t, citusCluster).migrated()
	ctx := t.Context()
	for _, node := range citusNodes {
		r := c.river(node, c.nodes[node], true)
		calls := map[string]error{}
		insert := func(opts *river.InsertOpts) *rivertype.JobInsertResult {
			result, err := r.Insert(ctx, plainJob{len(calls)}, opts)
			require.NoError(t, err)
			return result
		}
		later := &river.InsertOpts{ScheduledAt: time.Now().Add(time.Hour)}
		first := insert(&river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true, ByQueue: true}, Queue: node})
		calls["Insert, unique"] = nil
		again, err := r.Insert(ctx, plainJob{0}, &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true, ByQueue: true}, Queue: node})
		require.NoError(t, err)
		require.True(t, again.UniqueSkippedAsDuplicate)
		require.Equal(t, first.Job.ID, again.Job.ID)
		job := func() int64 { return insert(later).Job.ID }
		calls["JobCancel"] = second(r.JobCancel(ctx, job()))
		calls["JobDelete"] = second(r.JobDelete(ctx, job()))
		calls["JobDeleteMany"] = second(r.JobDeleteMany(ctx, river.NewJobDeleteManyParams().IDs(job())))
		calls["JobRetry"] = second(r.JobRetry(ctx, job()))
		calls["JobGet"] = second(r.JobGet(ctx, job()))
		calls["JobList"] = second(r.JobList(ctx, river.NewJobListParams()))
		calls["InsertMany"] = second(r.InsertMany(ctx, []river.InsertManyParams{{Args: plainJob{1}}, {Args: plainJob{2}}}))
		calls["InsertManyFast"] = second(r.InsertManyFast(ctx, []river.InsertManyParams{{Args: plainJob{1}}, {Args: plainJob{2}}}))
		require.NoError(t, r.Start(ctx))
		pgtest.WaitFor(t, "a leader", func() bool {
			return pgtest.Value[int](t, c.owner, "select count(*)::int from metered.river_leader where leader_id = '"+node+"'") == 1
		})
		calls["QueuePause"] = r.QueuePause(ctx, river.QueueDefault, nil)
		calls["QueueResume"] = r.QueueResume(ctx, river.QueueDefault, nil)
		calls["QueueGet"] = second(r.QueueGet(ctx, river.QueueDefault))
		calls["QueueList"] = second(r.QueueList(ctx, river.NewQueueListParams()))
		pgtest.WaitFor(t, "all jobs are worked", func() bool {
			return pgtest.Value[int](t, c.owner, "select count(*)::int from metered.river_job where state = 'available' and queue = 'default'") == 0
		})
		require.NoError(t, r.Stop(ctx))
		for call, err := range calls {
			if err != nil {
				t.Errorf("%s: %s: %v", node, call, err)
			}
		}
		require.Empty(t, r.complaints.all(), node)
	}
}

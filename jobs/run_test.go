package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// startGated starts a client with workers, and an Enqueuer on it.
func startGated(t *testing.T, pool *pgxpool.Pool, g *gated, workers *river.Workers) (*jobs.Enqueuer, *river.Client[pgx.Tx]) {
	t.Helper()
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 20}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond, PollOnly: true, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	require.NoError(t, err)
	e, err := jobs.New(client, jobs.Config{Holds: g.book, LockTimeout: time.Minute})
	require.NoError(t, err)
	require.NoError(t, client.Start(context.Background()))
	t.Cleanup(func() {
		ctx, cancel := pgtest.Patient(t)
		defer cancel()
		require.NoError(t, client.StopAndCancel(ctx))
	})
	return e, client
}

// run runs Run until the test ends.
func run(t *testing.T, e *jobs.Enqueuer, pool *pgxpool.Pool, onError func(error)) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx, pool, onError) }()
	t.Cleanup(func() {
		stop()
		require.ErrorIs(t, <-done, context.Canceled)
	})
}

func (g *gated) pending() int {
	g.t.Helper()
	return pgtest.Value[int](g.t, g.pool, "select count(*) from metered.holds where pending")
}

func (g *gated) states() string {
	g.t.Helper()
	return pgtest.Value[string](g.t, g.pool, `select coalesce(string_agg(state || ' ' || n, ', ' order by state), '') from (
		select state::text, count(*) as n from river_job group by 1) s`)
}

// Workers of River's own: a job holds its slot until it has ended, whichever way, and its end starts the next.
func TestRun_JobsOfPlainWorkersTakeTurnsInTheSlots(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	var running, most atomic.Int64
	var snoozed sync.Map
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[process]) error {
		for now := running.Add(1); ; {
			before := most.Load()
			if now <= before || most.CompareAndSwap(before, now) {
				break
			}
		}
		defer running.Add(-1)
		switch {
		case job.Args.Asset == "fails":
			return errors.New("no")
		case job.Args.Asset == "cancels":
			return river.JobCancel(errors.New("no"))
		case job.Args.Asset == "again":
			if _, later := snoozed.LoadOrStore(job.ID, true); !later {
				return river.JobSnooze(0)
			}
		}
		return nil
	}))
	e, _ := startGated(t, g.pool, g, workers)
	run(t, e, g.pool, func(err error) { t.Error(err) })
	for i := range 24 {
		o := needs(slots("gpu", 1, 3))
		o.Hold.Charges = []budget.Charge{{Scope: "calls", Amount: 2, Limits: []budget.Limit{budget.PerWindow(1000, time.Hour)}}}
		o.InsertOpts.MaxAttempts = 1
		g.mustEnqueue(process{[]string{"works", "fails", "cancels", "again"}[i%4]}, o)
	}
	pgtest.WaitFor(t, "all jobs have ended", func() bool { return g.states() == "cancelled 6, completed 12, discarded 6" })
	pgtest.WaitFor(t, "all holds have ended", func() bool { return g.pending() == 0 })
	require.LessOrEqual(t, most.Load(), int64(3))
	require.Zero(t, g.lines())
	usage, err := g.ledger.Usage(g.ctx, g.pool, budget.Query{Scope: "gpu"}, budget.Query{Scope: "calls"})
	require.NoError(t, err)
	require.Equal(t, []int64{0, 0, 48, 0}, []int64{usage[0].Spent, usage[0].Held, usage[1].Spent, usage[1].Held})
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// A client that works no jobs, or a job that ends in River's own maintenance, has no events: the next look finds the ends.
func TestRun_FindsJobsThatEndedElsewhere(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	ids := map[string]int64{}
	for _, name := range []string{"completed", "deleted", "cancelled", "running", "retryable"} {
		o := needs(slots(name, 1, 1))
		o.Tenant = name
		ids[name] = g.mustEnqueue(process{name}, o).JobID
		require.True(t, g.mustEnqueue(process{"next"}, o).Parked)
	}
	for name, sql := range map[string]string{
		"completed": "update river_job set state = 'completed', finalized_at = now() where id = $1",
		"deleted":   "delete from river_job where id = $1",
		"cancelled": "update river_job set state = 'cancelled', finalized_at = now() where id = $1",
		"running":   "update river_job set state = 'running', attempt = 1 where id = $1",
		"retryable": "update river_job set state = 'retryable' where id = $1",
	} {
		_, err := g.pool.Exec(g.ctx, sql, ids[name])
		require.NoError(t, err)
	}
	// Another job of the same id, after River's sequence was set back, is not the job of that hold.
	_, err := g.pool.Exec(g.ctx, "insert into river_job (id, kind, args, max_attempts) values ($1, 'other', '{}', 1)", ids["deleted"])
	require.NoError(t, err)
	run(t, g.Enqueuer, g.pool, func(err error) { t.Error(err) })
	pgtest.WaitFor(t, "three jobs start", func() bool { return pgtest.Count(t, g.pool, "metered.parked_jobs") == 2 })
	report := g.release()
	require.Equal(t, jobs.ReleaseReport{}, report)
	for name, parked := range map[string]int{"completed": 0, "deleted": 0, "cancelled": 0, "running": 1, "retryable": 1} {
		require.Equal(t, parked, pgtest.Value[int](t, g.pool, "select count(*) from metered.parked_jobs where scope = $1", name), name)
	}
}

// A hold that was captured in full frees nothing now, and all of its window's units later, long before it would have fallen due.
func TestGated_CapturedUnitsLeaveTheWindowInTime(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	line := holds.Line{Scope: "gpu", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1, time.Minute)}}
	first := g.mustEnqueue(process{"a"}, needs(line))
	require.True(t, g.mustEnqueue(process{"b"}, needs(line)).Parked)
	require.Zero(t, g.release().Released)
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := g.book.Capture(g.ctx, tx, holds.Capture{IDs: []string{jobs.Of(first.Job).Hold}, All: true})
		return err
	})
	require.Zero(t, g.release().Released)
	clock.Advance(time.Minute)
	require.EqualValues(t, 1, g.release().Released)
}

// A line of many hundreds, of more classes than a look asks first, is looked at in parts. A job that joins it before the place where
// the next part goes on is looked at in its time.
func TestGated_AJobThatJoinsDuringALookIsNotForgotten(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	charge := func(amount, most int64, window time.Duration, priority int) *jobs.Options {
		o := &jobs.Options{Hold: &jobs.Units{Charges: []budget.Charge{{Scope: "rate", Amount: amount, Limits: []budget.Limit{budget.PerWindow(most, window)}}}}}
		o.InsertOpts.Priority = priority
		return o
	}
	require.False(t, g.mustEnqueue(process{"now"}, charge(5, 10, time.Hour, 0)).Parked)
	var items []jobs.Item
	for i := range 510 { // for an hour or two
		items = append(items, jobs.Item{Args: process{"wait"}, Options: charge(6, 10, time.Hour+time.Duration(i)*time.Second, 2)})
	}
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := g.EnqueueMany(g.ctx, tx, items)
		return err
	})
	require.True(t, g.lookAt("rate"))
	// One of a class that no look asks first, for a minute.
	early, window := int64(0), time.Minute
	for ; early == 0; window += time.Second {
		id := g.mustEnqueue(process{"early"}, charge(1, 5, window, 1)).JobID
		if pgtest.Value[int](t, g.pool, "select count(distinct class) from metered.parked_jobs where class < (select class from metered.parked_jobs where job_id = $1)", id) > 64 {
			early = id
		} else {
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.CancelParked(g.ctx, tx, id); return err })
		}
	}
	require.Zero(t, g.release().Released)
	clock.Advance(window)
	require.EqualValues(t, 1, g.release().Released)
	require.Contains(t, g.river(), early)
}

// lookAt goes through a part of a line, and reports whether jobs are left for the next one.
func (g *gated) lookAt(scope string) bool {
	g.t.Helper()
	_, err := g.pool.Exec(g.ctx, "select metered.release_jobs(array[$1], null, 1000, 1, interval '1 minute', null, null)", scope)
	require.NoError(g.t, err)
	return pgtest.Value[bool](g.t, g.pool, "select after is not null from metered.parked_scopes where scope = $1", scope)
}

// killer ends backends of these pools at random times, n of them.
func killer(ctx context.Context, t *testing.T, owner *pgxpool.Pool, name string, n int) {
	for range n {
		if ctx.Err() != nil {
			return
		}
		_, err := owner.Exec(ctx, `select pg_terminate_backend(pid), pg_sleep(0.02) from (
			select pid from pg_stat_activity where application_name = $1 and state <> 'idle' order by random() limit 1) p`, name)
		if err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	}
}

// Clients with workers, releasers and producers, whose connections are killed: every job ends once or, by River's rescue, again, the
// slots are never exceeded, and nothing is held or parked in the end.
func TestRun_KilledConnectionsLoseNoJobAndNoUnit(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	var cancel context.CancelFunc
	g.ctx, cancel = context.WithTimeout(context.Background(), pgtest.Size(6*time.Minute, 20*time.Minute))
	defer cancel()
	const most = 4
	total := pgtest.Size(60, 2000)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[process]) error {
		if job.Attempt == 1 && job.ID%5 == 0 {
			return errors.New("once")
		}
		return nil
	}))
	for range 2 {
		config := g.pool.Config()
		config.ConnConfig.RuntimeParams["application_name"] = "victim"
		pool, err := pgxpool.NewWithConfig(g.ctx, config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		e, _ := startGated(t, pool, g, workers)
		run(t, e, pool, nil)
	}
	ctx, stop := context.WithCancel(g.ctx)
	killed := make(chan struct{})
	go func() { defer close(killed); killer(ctx, t, g.pool, "victim", pgtest.Size(40, 800)) }()
	defer func() { stop(); <-killed }()
	require.NoError(t, pgtest.InParallel(4, func(w int) error {
		for i := range total / 4 {
			o := needs(slots("gpu", 1, most))
			o.Key, o.FairKey = fmt.Sprintf("%d/%d", w, i), fmt.Sprint(i%3)
			o.Hold.Charges = []budget.Charge{{Scope: "calls", Amount: 3, Limits: []budget.Limit{budget.PerWindow(1_000_000, time.Hour)}}}
			for { // on a hot scope, an old snapshot collides again and again
				err := pgtest.Retried(g.ctx, g.pool, isolationLevels[i%3], func(tx pgx.Tx) error {
					_, err := g.Enqueue(g.ctx, tx, process{"x"}, o)
					return err
				})
				if err == nil {
					break
				} else if !metered.Retryable(err) {
					return err
				}
			}
		}
		return nil
	}))
	completed := fmt.Sprintf("completed %d", total)
	pgtest.WaitFor(t, "all jobs to be completed", func() bool {
		// As River's rescuer and its scheduler do, which take an hour: jobs whose worker could not write their end.
		_, err := g.pool.Exec(g.ctx, `update river_job set state = 'available', scheduled_at = now() where state = 'retryable'
			or state = 'running' and attempted_at < now() - interval '2 seconds'`)
		require.NoError(t, err)
		return g.states() == completed && pgtest.Count(t, g.pool, "metered.parked_jobs") == 0
	})
	pgtest.WaitFor(t, "all holds have ended", func() bool { return g.pending() == 0 })
	require.LessOrEqual(t, pgtest.Value[int64](t, g.pool, "select max(spent - refunded - credited + held) from metered.ledger where scope = 'gpu'"), int64(most))
	usage, err := g.ledger.Usage(g.ctx, g.pool, budget.Query{Scope: "gpu"}, budget.Query{Scope: "calls"})
	require.NoError(t, err)
	require.Equal(t, []int64{0, 0, int64(3 * total)}, []int64{usage[0].Spent, usage[0].Held, usage[1].Spent})
	require.Zero(t, g.lines())
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// cancelAt ends a context as a pool sends a statement that contains text.
type cancelAt struct {
	text   string
	cancel func()
}

func (c cancelAt) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	if strings.Contains(query.SQL, c.text) {
		c.cancel()
	}
	return ctx
}

func (cancelAt) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A stop is no error, at whichever statement it comes.
func TestRun_ReportsNoErrorWhenItIsStopped(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	for range 2 {
		g.mustEnqueue(process{"a"}, needs(slots("a", 1, 1)))
	}
	for _, text := range []string{"begin", "drop_parked", "next_release", "river_job"} {
		ctx, cancel := context.WithCancel(context.Background())
		pool := pgtest.Reopen(t, g.pool, func(c *pgxpool.Config) { c.ConnConfig.Tracer = cancelAt{text, cancel} })
		require.ErrorIs(t, g.Run(ctx, pool, func(err error) { t.Errorf("at %s: %v", text, err) }), context.Canceled)
		pool.Close()
	}
}

// Run sleeps for five seconds where it hears nothing. It hears of freed units, and of a job that joins a line and fits.
func TestRun_HearsOfFreedUnitsAndOfEarlierLooksAtOnce(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	run(t, g.Enqueuer, g.pool, func(err error) { t.Error(err) })
	place := func(id string) {
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := g.book.Place(g.ctx, tx, holds.Placement{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: id, Amount: 3}}})
			return err
		})
	}
	started := func(id int64) time.Duration {
		began := time.Now()
		pgtest.WaitFor(t, "the job starts", func() bool { return contains(g.river(), id) })
		return time.Since(began)
	}
	const least = 4 * time.Second
	freed, joined := time.Hour, time.Hour
	for round := 0; max(freed, joined) >= least; round++ { // Run has just looked when a round begins, and the machine may be busy in one of them
		require.Less(t, round, 20)
		scope := fmt.Sprint("scope/", round)
		place(scope)
		large := g.mustEnqueue(process{"large"}, needs(slots(scope, 3, 4)))
		require.True(t, large.Parked)
		time.Sleep(100 * time.Millisecond) // Run may look at the new line
		small := g.mustEnqueue(process{"small"}, needs(slots(scope, 1, 4)))
		require.True(t, small.Parked, "it waits for its turn, though it fits")
		joined = min(joined, started(small.JobID))
		g.end(small.JobID)
		time.Sleep(100 * time.Millisecond)
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := g.book.Release(g.ctx, tx, holds.Release{IDs: []string{scope}})
			return err
		})
		freed = min(freed, started(large.JobID))
	}
}

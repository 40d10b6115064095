package integration_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
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
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// gatedEnv is set in the child processes that work gated jobs.
const gatedEnv = "METERED_TEST_GATED"

// plainJob is worked by a worker of River's own, and costedJob by one that charges its actual cost.
type plainJob struct {
	N int `json:"n"`
}

func (plainJob) Kind() string { return "plain" }

type costedJob struct {
	N int `json:"n"`
}

func (costedJob) Kind() string { return "costed" }

func (j costedJob) cost() int64 { return int64(1 + j.N%10) }

// fails is the error of some jobs' first attempts.
func fails(n, attempt int) error {
	if n%7 < 2 && attempt == 1 {
		return errors.New("once")
	}
	return nil
}

const (
	slotsOfAll = 4
	estimate   = 10
)

// workGated works the jobs of a database, and releases parked ones, until the process is killed.
func workGated(ctx context.Context, connString string) error {
	config, err := pgxpool.ParseConfig(connString)
	if err != nil {
		return err
	}
	config.MaxConns = 10
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		return err
	}
	book, err := holds.New(ledger, holds.Config{})
	if err != nil {
		return err
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[plainJob]) error {
		return fails(job.Args.N, job.Attempt)
	}))
	river.AddWorker(workers, jobs.NewWorker(pool, book, func(_ context.Context, job *river.Job[costedJob]) (jobs.JobCost, error) {
		return jobs.JobCost{Lines: []holds.Line{{Scope: "tokens", Amount: job.Args.cost()}}, Write: func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "insert into uploads (id, scope, amount) values ($1, 'tokens', $2)", fmt.Sprint(job.Args.N), job.Args.cost())
			return err
		}}, fails(job.Args.N, job.Attempt)
	}, jobs.WorkerOptions{Timeout: 30 * time.Second, RetryAfter: 300 * time.Millisecond}))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 5}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return err
	}
	enqueuer, err := jobs.New(client, jobs.Config{Holds: book})
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	return enqueuer.Run(ctx, pool, nil)
}

// gatedWorker starts a process that works the jobs.
func gatedWorker(t *testing.T, connString string) *exec.Cmd {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env, c.Stderr = append(os.Environ(), gatedEnv+"="+connString), os.Stderr
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	return c
}

// enqueueGated enqueues a job in a command, which is repeated until it is committed.
func (s *system) enqueueGated(ctx context.Context, n int, timeout time.Duration) error {
	slot := holds.Line{Scope: "slots", Amount: int64(1 + n%2), Limits: []budget.Limit{budget.Lifetime(slotsOfAll)}}
	opts := &jobs.Options{Key: fmt.Sprint(n), FairKey: fmt.Sprint(n % 3), GiveBack: n%3 > 0, Hold: &jobs.Units{Lines: []holds.Line{slot}}}
	var args river.JobArgs = plainJob{n}
	if n%2 == 0 {
		args = costedJob{n}
		opts.Hold.Lines = append(opts.Hold.Lines, holds.Line{Scope: "tokens", Amount: estimate, Limits: []budget.Limit{budget.PerWindow(1_000_000, time.Hour)}})
	} else {
		opts.Hold.Charges = []budget.Charge{{Scope: "calls", Amount: 3, Limits: []budget.Limit{budget.PerWindow(1_000_000, time.Hour)}}}
	}
	if n%5 == 0 { // a slot of its own, or else one of all
		burst := *opts.Hold
		burst.Lines, opts.Hold.Lines = opts.Hold.Lines, append([]holds.Line{{Scope: "own", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}, opts.Hold.Lines[1:]...)
		opts.Burst = &burst
	}
	for {
		attempt, cancel := context.WithTimeout(ctx, timeout)
		_, err := metered.Do(attempt, s.c, metered.Command{ID: fmt.Sprint("job ", n), Input: n}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			return tx.Enqueue(ctx, args, opts)
		})
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond) // the server restarts
	}
}

// Processes work gated jobs, and are killed, and the server crashes. Each job is worked to its end, the slots are never exceeded, the
// sums are exact, and nothing is held or parked in the end. Some jobs fail, and most of them give their units back until their next attempt.
func TestGated_SurvivesKilledWorkersAndCrashesOfTheServer(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Size(10*time.Minute, 40*time.Minute))
	defer cancel()
	total, faults := pgtest.Size(75, 3000), pgtest.Size(3, 60)
	server, err := pgserver.Start(ctx, pgserver.Options{Private: true, Durable: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	s := open(t, server.ConnString(), metered.Config{})
	address := pgserver.WithDatabase(server.ConnString(), s.pool.Config().ConnConfig.Database)
	processes := []*exec.Cmd{gatedWorker(t, address), gatedWorker(t, address)}

	var producers sync.WaitGroup
	for w := range 3 {
		producers.Go(func() {
			for n := w; n < total; n += 3 {
				if err := s.enqueueGated(ctx, n, 10*time.Second); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for done, next := 0, 1; ; time.Sleep(50 * time.Millisecond) {
		require.NoError(t, ctx.Err())
		// As River's scheduler and its rescuer do, which take longer: jobs of processes that were killed.
		_, err := s.pool.Exec(ctx, "update river_job set state = 'available' where state = 'retryable' and scheduled_at <= now()")
		if err == nil {
			_, err = s.pool.Exec(ctx, `update river_job set state = 'retryable', scheduled_at = now() + interval '1 second'
				where state = 'running' and attempted_at < now() - interval '3 seconds'`)
		}
		if err == nil {
			err = s.pool.QueryRow(ctx, "select count(*) from river_job where state = 'completed'").Scan(&done)
		}
		require.NoError(t, err)
		if done == total {
			break
		}
		if next > faults || done < next*total/(faults+1) {
			continue
		}
		if next%3 == 0 {
			require.NoError(t, server.Kill())
			require.NoError(t, server.Restart(ctx))
			s.pool.Reset()
		} else {
			i := next % len(processes)
			require.NoError(t, processes[i].Process.Kill())
			_ = processes[i].Wait()
			processes[i] = gatedWorker(t, address)
		}
		next++
	}
	producers.Wait()
	number := func(sql string) (n int64) {
		require.NoError(t, s.pool.QueryRow(ctx, sql).Scan(&n), sql)
		return n
	}
	pgtest.WaitFor(t, "all holds have ended", func() bool { return number("select count(*) from metered.holds where pending") == 0 })
	require.NotZero(t, number("select count(*) from metered.hold_events where note ->> 'reason' = 'the job waits for its next attempt'"))
	require.Zero(t, number("select count(*) from metered.parked_jobs"))
	require.Zero(t, number("select count(*) from metered.parked_scopes"))
	require.EqualValues(t, total, number("select count(*) from river_job"))
	require.LessOrEqual(t, number("select max(spent + held) from metered.ledger where scope = 'slots'"), int64(slotsOfAll))
	require.EqualValues(t, 1, number("select max(spent + held) from metered.ledger where scope = 'own'"))
	var tokens int64
	for n := 0; n < total; n += 2 {
		tokens += costedJob{n}.cost()
	}
	usage, err := s.c.Budget.Usage(ctx, s.pool, budget.Query{Scope: "slots"}, budget.Query{Scope: "calls"}, budget.Query{Scope: "tokens"}, budget.Query{Scope: "own"})
	require.NoError(t, err)
	require.Equal(t, []int64{0, int64(total / 2 * 3), tokens, 0}, []int64{usage[0].Spent, usage[1].Spent, usage[2].Spent, usage[3].Spent})
	require.Zero(t, usage[0].Held+usage[1].Held+usage[2].Held+usage[3].Held)
	require.EqualValues(t, tokens, number("select sum(amount) from uploads"))
	require.EqualValues(t, (total+1)/2, number("select count(*) from uploads"))
	pgtest.RequireVerified(t, s.pool, s.c.Budget)
}

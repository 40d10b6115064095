package jobs_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// render is a job that may cost up to 10 units of a budget of 100.
type render struct {
	Hold jobs.HoldRef `json:"hold"`
}

func (render) Kind() string           { return "render" }
func (r render) HeldBy() jobs.HoldRef { return r.Hold }

type rendering = river.Job[render]

// submit holds 10 of the scope "gpu" for a minute, and enqueues a job.
func submit(t *testing.T, c *metered.Client, maxAttempts int) (jobID int64) {
	t.Helper()
	_, err := metered.Do(t.Context(), c, metered.Command{ID: metered.NewID(), Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		id, err := tx.Place(ctx, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{room("gpu", 10, 100)}}, nil)
		if err != nil {
			return nil, err
		}
		job, err := tx.Enqueue(ctx, render{jobs.HoldRef{ID: id}}, &jobs.Options{InsertOpts: river.InsertOpts{MaxAttempts: maxAttempts}})
		jobID = job.JobID
		return nil, err
	})
	require.NoError(t, err)
	return jobID
}

// startWorkers starts a River client, and stops it when the test ends.
func startWorkers(t *testing.T, pool *pgxpool.Pool, workers *river.Workers) *river.Client[pgx.Tx] {
	t.Helper()
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond, PollOnly: true,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	require.NoError(t, err)
	require.NoError(t, client.Start(context.Background()))
	t.Cleanup(func() { stopWorkers(t, client) })
	return client
}

func stopWorkers(t *testing.T, client *river.Client[pgx.Tx]) {
	t.Helper()
	ctx, cancel := pgtest.Patient(t)
	defer cancel()
	require.NoError(t, client.StopAndCancel(ctx))
}

// renders does a render job.
type renders = func(context.Context, *rendering) (jobs.JobCost, error)

// workHeld starts a worker of render jobs.
func workHeld(t *testing.T, pool *pgxpool.Pool, c *metered.Client, opts jobs.WorkerOptions, work renders) *river.Client[pgx.Tx] {
	t.Helper()
	workers := river.NewWorkers()
	river.AddWorker(workers, jobs.NewWorker(pool, c.Holds, work, opts))
	return startWorkers(t, pool, workers)
}

// costs is work that used so many units, and writes a row.
func costs(amount int64, over holds.Over) renders {
	return func(context.Context, *rendering) (jobs.JobCost, error) {
		return jobs.JobCost{
			Lines: []holds.Line{room("gpu", amount, 100)}, Over: over, Entity: "picture",
			Write: func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `insert into uploads values ('picture')`)
				return err
			},
		}, nil
	}
}

func awaitJob(t *testing.T, pool *pgxpool.Pool, id int64, state string) {
	t.Helper()
	pgtest.WaitFor(t, "the job to be "+state, func() bool {
		return pgtest.Value[string](t, pool, `select state::text from river_job where id = $1`, id) == state
	})
}

// books is the state of a submitted job, and of its hold.
type books struct {
	Job         string
	Hold        holds.State
	Spent, Held int64
	Rows        int
}

func booksOf(t *testing.T, pool *pgxpool.Pool, c *metered.Client, job int64) (b books) {
	t.Helper()
	h, err := c.Holds.Get(t.Context(), pool, "", "h", "")
	require.NoError(t, err)
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "gpu"})
	require.NoError(t, err)
	report, err := c.Budget.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	b = books{Hold: h.State, Spent: usage[0].Spent, Held: usage[0].Held, Rows: pgtest.Value[int](t, pool, "select count(*) from uploads")}
	b.Job = pgtest.Value[string](t, pool, `select state::text from river_job where id = $1`, job)
	return b
}

func lastEvent(t *testing.T, pool *pgxpool.Pool, c *metered.Client) holds.HistoryEvent {
	t.Helper()
	history, err := c.Holds.History(t.Context(), pool, "", "h", "")
	require.NoError(t, err)
	return history[len(history)-1]
}

func TestHeldWorker_CapturesTheActualCostWithTheJobAndItsWrites(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	require.Equal(t, books{Job: "available", Hold: holds.Held, Held: 10}, booksOf(t, pool, c, job))
	workHeld(t, pool, c, jobs.WorkerOptions{}, costs(7, holds.OverRefused))
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
	e := lastEvent(t, pool, c)
	require.Equal(t, "picture", e.Entity)
	require.Equal(t, "job:render", e.Note.Actor)
	require.Regexp(t, `^job \d+, attempt 1$`, e.Note.Correlation)
}

// A job's cost reaches a threshold on spending: it is reported once, with the job.
func TestHeldWorker_ReportsThresholds(t *testing.T) {
	t.Parallel()
	limit := budget.Lifetime(10).WithThresholds(budget.Threshold{Name: "half", Percent: 50, Spent: true})
	for _, cost := range []jobs.JobCost{
		{Lines: []holds.Line{{Scope: "gpu", Amount: 7, Limits: []budget.Limit{limit}}}},
		{All: true, Lines: []holds.Line{{Scope: "gpu", Limits: []budget.Limit{limit}}}},
	} {
		t.Run(fmt.Sprint(cost.All), func(t *testing.T) {
			var told atomic.Int64
			pool, c := setUp(t, metered.Config{Config: budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, crossing budget.Crossing) error {
				_, err := tx.Exec(ctx, `insert into uploads values ($1)`, crossing.Threshold.Name)
				if told.Add(1) == 1 {
					return errOwn
				}
				return err
			}}})
			job := submit(t, c, 3)
			workHeld(t, pool, c, jobs.WorkerOptions{RetryAfter: time.Millisecond}, func(context.Context, *rendering) (jobs.JobCost, error) { return cost, nil })
			awaitJob(t, pool, job, "completed")
			spent := int64(7)
			if cost.All {
				spent = 10
			}
			require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: spent, Rows: 1}, booksOf(t, pool, c, job))
			require.EqualValues(t, 2, told.Load(), "it was refused once, and nothing was settled")
		})
	}
}

// Whichever of the three parts fails, at its time or at COMMIT, the others are undone.
func TestHeldWorker_CaptureCompletionAndWritesAreAllOrNothing(t *testing.T) {
	t.Parallel()
	for _, fault := range []string{
		"create constraint trigger no after insert on metered.ledger deferrable initially %s for each row when (new.kind = 'u') execute function no()",
		"create constraint trigger no after update on river_job deferrable initially %s for each row when (new.state = 'completed') execute function no()",
		"create constraint trigger no after insert on uploads deferrable initially %s for each row execute function no()",
	} {
		for _, when := range []string{"immediate", "deferred"} {
			t.Run(when, func(t *testing.T) {
				pool, c := setUp(t, metered.Config{})
				_, err := pool.Exec(t.Context(), `create function no() returns trigger language plpgsql as $$ begin raise 'no'; end $$`)
				require.NoError(t, err)
				_, err = pool.Exec(t.Context(), fmt.Sprintf(fault, when))
				require.NoError(t, err)
				job := submit(t, c, 1)
				workHeld(t, pool, c, jobs.WorkerOptions{}, costs(7, holds.OverRefused))
				awaitJob(t, pool, job, "discarded")
				require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job), "%s, %s", fault, when)
			})
		}
	}
}

func TestHeldWorker_NothingUsedIsReleased(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	workHeld(t, pool, c, jobs.WorkerOptions{}, func(context.Context, *rendering) (jobs.JobCost, error) {
		return jobs.JobCost{Nothing: true}, nil
	})
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Released}, booksOf(t, pool, c, job))
	require.Equal(t, "nothing was used", lastEvent(t, pool, c).Note.Reason)
}

func TestHeldWorker_AllOfTheEstimate(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	workHeld(t, pool, c, jobs.WorkerOptions{}, func(context.Context, *rendering) (jobs.JobCost, error) {
		return jobs.JobCost{All: true, Entity: "picture"}, nil
	})
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 10}, booksOf(t, pool, c, job))
}

// An empty JobCost is no answer: neither "nothing was used" nor "all of it".
func TestHeldWorker_ACostMustNameTheUnitsUsed(t *testing.T) {
	t.Parallel()
	lines := []holds.Line{room("gpu", 7, 100)}
	for _, cost := range []jobs.JobCost{
		{}, {All: true, Nothing: true}, {Lines: lines, All: true}, {All: true, Over: holds.OverAllowed},
	} {
		t.Run(fmt.Sprintf("%+v", cost), func(t *testing.T) {
			pool, c := setUp(t, metered.Config{})
			job := submit(t, c, 1)
			cost.Write = func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `insert into uploads values ('picture')`)
				return err
			}
			workHeld(t, pool, c, jobs.WorkerOptions{}, func(context.Context, *rendering) (jobs.JobCost, error) { return cost, nil })
			awaitJob(t, pool, job, "discarded")
			require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job), "%+v", cost)
			require.Contains(t, pgtest.Value[string](t, pool, `select errors[1]->>'error' from river_job where id = $1`, job), "invalid argument")
		})
	}
}

func TestHeldWorker_OverTheEstimate(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		over  holds.Over
		used  int64
		taken int64 // by others
		want  books
		fails string
	}{
		{holds.OverRefused, 11, 0, books{Job: "discarded", Hold: holds.Released}, "exceeds the open units"},
		{holds.OverIfFits, 11, 89, books{Job: "completed", Hold: holds.Captured, Spent: 100, Rows: 1}, ""},
		{holds.OverIfFits, 11, 90, books{Job: "discarded", Hold: holds.Released, Spent: 90}, "requested 1,"},
		{holds.OverAllowed, 11, 90, books{Job: "completed", Hold: holds.Captured, Spent: 101, Rows: 1}, ""},
	} {
		t.Run(fmt.Sprint(test.over, test.taken), func(t *testing.T) {
			pool, c := setUp(t, metered.Config{})
			if test.taken > 0 {
				require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "gpu", Amount: test.taken})
					return err
				}))
			}
			job := submit(t, c, 1)
			workHeld(t, pool, c, jobs.WorkerOptions{}, costs(test.used, test.over))
			awaitJob(t, pool, job, test.want.Job)
			require.Equal(t, test.want, booksOf(t, pool, c, job), "%q, %d", test.over, test.taken)
			require.Contains(t, pgtest.Value[string](t, pool, `select coalesce(errors[1]->>'error', '') from river_job where id = $1`, job), test.fails)
		})
	}
}

// Past the wrapper, by the bare connection: the job's write and its cost are committed together or not at all.
func TestHeldWorker_WriteCannotEndTheTransactionByTheConnection(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"commit; begin", "rollback; begin", "rollback and chain"} {
		t.Run(sql, func(t *testing.T) {
			pool, c := setUp(t, metered.Config{})
			job := submit(t, c, 1)
			workHeld(t, pool, c, jobs.WorkerOptions{}, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
				cost, err := costs(7, holds.OverRefused)(ctx, j)
				own := cost.Write
				cost.Write = func(ctx context.Context, tx pgx.Tx) error {
					_, _ = tx.Conn().Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
					if tx.Conn().PgConn().TxStatus() != 'T' {
						return nil
					}
					return own(ctx, tx)
				}
				return cost, err
			})
			awaitJob(t, pool, job, "discarded")
			require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job), sql)
		})
	}
}

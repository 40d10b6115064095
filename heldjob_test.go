package metered_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
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
	Hold metered.HoldRef `json:"hold"`
}

func (render) Kind() string              { return "render" }
func (r render) HeldBy() metered.HoldRef { return r.Hold }

type rendering = river.Job[render]

// submit holds 10 of the scope "gpu" for a minute, and enqueues a job.
func submit(t *testing.T, c *metered.Client, maxAttempts int) (jobID int64) {
	t.Helper()
	_, err := metered.Do(t.Context(), c, metered.Command{ID: metered.NewID()}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		id, err := tx.Place(ctx, holds.Request{ID: "h", TTL: time.Minute, Lines: []holds.Line{room("gpu", 10, 100)}}, nil)
		if err != nil {
			return nil, err
		}
		job, err := tx.Enqueue(ctx, render{metered.HoldRef{ID: id}}, &jobs.Options{InsertOpts: river.InsertOpts{MaxAttempts: maxAttempts}})
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
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	require.NoError(t, err)
	require.NoError(t, client.Start(context.Background()))
	t.Cleanup(func() { stopWorkers(t, client) })
	return client
}

func stopWorkers(t *testing.T, client *river.Client[pgx.Tx]) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, client.StopAndCancel(ctx))
}

// workHeld starts a worker of render jobs.
func workHeld(t *testing.T, pool *pgxpool.Pool, c *metered.Client, opts metered.HeldOptions, work metered.HeldWork[render]) *river.Client[pgx.Tx] {
	t.Helper()
	workers := river.NewWorkers()
	river.AddWorker(workers, metered.HeldWorker(c, work, opts))
	return startWorkers(t, pool, workers)
}

// costs is work that used so many units, and writes a row.
func costs(amount int64, over holds.Over) metered.HeldWork[render] {
	return func(context.Context, *rendering) (metered.Cost, error) {
		return metered.Cost{
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
	require.Eventually(t, func() bool {
		return queryRow[string](t, pool, `select state::text from river_job where id = $1`, id) == state
	}, 30*time.Second, 5*time.Millisecond, "job is to be "+state)
}

// books is what became of a submitted job.
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
	require.True(t, report.OK(), report.Differences)
	b = books{Hold: h.State, Spent: usage[0].Spent, Held: usage[0].Held, Rows: count(t, pool, "uploads")}
	b.Job = queryRow[string](t, pool, `select state::text from river_job where id = $1`, job)
	return b
}

func lastEvent(t *testing.T, pool *pgxpool.Pool, c *metered.Client) holds.Event {
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
	workHeld(t, pool, c, metered.HeldOptions{}, costs(7, holds.OverRefused))
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
	e := lastEvent(t, pool, c)
	require.Equal(t, "picture", e.Entity)
	require.Equal(t, "job:render", e.Note.Actor)
	require.Regexp(t, `^job \d+, attempt 1$`, e.Note.Correlation)
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
			pool, c := setUp(t, metered.Config{})
			_, err := pool.Exec(t.Context(), `create function no() returns trigger language plpgsql as $$ begin raise 'no'; end $$`)
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), fmt.Sprintf(fault, when))
			require.NoError(t, err)
			job := submit(t, c, 1)
			workHeld(t, pool, c, metered.HeldOptions{}, costs(7, holds.OverRefused))
			awaitJob(t, pool, job, "discarded")
			require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job), "%s, %s", fault, when)
		}
	}
}

func TestHeldWorker_NothingUsedIsReleased(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	workHeld(t, pool, c, metered.HeldOptions{}, func(context.Context, *rendering) (metered.Cost, error) { return metered.Cost{}, nil })
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Released}, booksOf(t, pool, c, job))
	require.Equal(t, "nothing was used", lastEvent(t, pool, c).Note.Reason)
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
		{holds.OverRefused, 11, 0, books{Job: "discarded", Hold: holds.Released}, "exceeds what is held"},
		{holds.OverIfFits, 11, 89, books{Job: "completed", Hold: holds.Captured, Spent: 100, Rows: 1}, ""},
		{holds.OverIfFits, 11, 90, books{Job: "discarded", Hold: holds.Released, Spent: 90}, "requested 1,"},
		{holds.OverAllowed, 11, 90, books{Job: "completed", Hold: holds.Captured, Spent: 101, Rows: 1}, ""},
	} {
		pool, c := setUp(t, metered.Config{})
		if test.taken > 0 {
			fill(t, pool, c, "gpu", test.taken)
		}
		job := submit(t, c, 1)
		workHeld(t, pool, c, metered.HeldOptions{}, costs(test.used, test.over))
		awaitJob(t, pool, job, test.want.Job)
		require.Equal(t, test.want, booksOf(t, pool, c, job), "%q, %d", test.over, test.taken)
		require.Contains(t, queryRow[string](t, pool, `select coalesce(errors[1]->>'error', '') from river_job where id = $1`, job), test.fails)
	}
}

func TestHeldWorker_AFailedAttemptStaysHeldUntilTheNext(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	job := submit(t, c, 3)
	var runs atomic.Int64
	opts := metered.HeldOptions{Timeout: 5 * time.Minute, RetryAfter: time.Second, Margin: 20 * time.Minute}
	left := make(chan time.Duration, 3)
	workHeld(t, pool, c, opts, func(ctx context.Context, j *rendering) (metered.Cost, error) {
		h, err := c.Holds.Get(ctx, pool, "", "h", "")
		if err != nil {
			return metered.Cost{}, err
		}
		left <- h.Remaining()
		if runs.Add(1) < 3 {
			clock.Advance(opts.Timeout + opts.Margin - time.Second) // it took all of its time, and the queue
			return metered.Cost{}, errOwn
		}
		return costs(7, holds.OverRefused)(ctx, j)
	})
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
	for range 3 {
		require.Equal(t, opts.Timeout+opts.Margin, <-left)
	}
}

func TestHeldWorker_TheLastFailureAndACancellationRelease(t *testing.T) {
	t.Parallel()
	for reason, test := range map[string]struct {
		attempts int
		end      func(ctx context.Context, c *river.Client[pgx.Tx], j *rendering) error
		job      string
	}{
		"failed for the last time": {1, func(context.Context, *river.Client[pgx.Tx], *rendering) error { return errOwn }, "discarded"},
		"cancelled by its work": {5, func(context.Context, *river.Client[pgx.Tx], *rendering) error {
			return river.JobCancel(errOwn)
		}, "cancelled"},
		"cancelled": {5, func(ctx context.Context, c *river.Client[pgx.Tx], j *rendering) error {
			if _, err := c.JobCancel(ctx, j.ID); err != nil {
				return err
			}
			<-ctx.Done()
			return river.JobSnooze(time.Hour) // has no effect then
		}, "cancelled"},
		"failed for the last time ": {1, func(context.Context, *river.Client[pgx.Tx], *rendering) error { panic("oh") }, "discarded"},
	} {
		pool, c := setUp(t, metered.Config{})
		job := submit(t, c, test.attempts)
		workHeld(t, pool, c, metered.HeldOptions{}, func(ctx context.Context, j *rendering) (metered.Cost, error) {
			return metered.Cost{}, test.end(ctx, river.ClientFromContext[pgx.Tx](ctx), j)
		})
		awaitJob(t, pool, job, test.job)
		require.Equal(t, books{Job: test.job, Hold: holds.Released}, booksOf(t, pool, c, job), reason)
		require.Equal(t, strings.TrimSpace(reason), lastEvent(t, pool, c).Note.Reason)
	}
}

func TestHeldWorker_APanicThatIsNotTheLastKeepsTheHoldAndItsTrace(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 2)
	var runs atomic.Int64
	workHeld(t, pool, c, metered.HeldOptions{RetryAfter: time.Millisecond}, func(ctx context.Context, j *rendering) (metered.Cost, error) {
		if runs.Add(1) == 1 {
			panics()
		}
		return costs(7, holds.OverRefused)(ctx, j)
	})
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
	require.Contains(t, queryRow[string](t, pool, `select errors[1]->>'trace' from river_job where id = $1`, job), "metered_test.panics")
}

func panics() { panic("oh") }

func TestHeldWorker_ASnoozedJobStaysHeldUntilItRuns(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	pgtest.SetClock(t, pool, time.Now())
	job := submit(t, c, 1)
	workHeld(t, pool, c, metered.HeldOptions{Margin: 7 * time.Minute}, func(context.Context, *rendering) (metered.Cost, error) {
		return metered.Cost{}, river.JobSnooze(time.Hour)
	})
	awaitJob(t, pool, job, "scheduled")
	h, err := c.Holds.Get(t.Context(), pool, "", "h", "")
	require.NoError(t, err)
	require.Equal(t, time.Hour+7*time.Minute, h.Remaining())
}

// A client that is stopped gives its jobs back, and does not count the attempt: the last one either.
func TestHeldWorker_AStoppedClientGivesTheJobBackHeld(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	running := make(chan struct{})
	client := workHeld(t, pool, c, metered.HeldOptions{}, func(ctx context.Context, _ *rendering) (metered.Cost, error) {
		close(running)
		<-ctx.Done()
		return metered.Cost{}, ctx.Err()
	})
	<-running
	stopWorkers(t, client)
	require.Equal(t, books{Job: "available", Hold: holds.Held, Held: 10}, booksOf(t, pool, c, job))
	workHeld(t, pool, c, metered.HeldOptions{}, costs(7, holds.OverRefused))
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
}

func TestHeldWorker_AJobThatIsNotHeldAnyMoreIsCancelledUnworked(t *testing.T) {
	t.Parallel()
	end := func(ctx context.Context, pool *pgxpool.Pool, do func(tx pgx.Tx) error) error {
		return pgx.BeginFunc(ctx, pool, do)
	}
	for state, lose := range map[holds.State]func(pool *pgxpool.Pool, c *metered.Client) error{
		holds.Expired: func(pool *pgxpool.Pool, _ *metered.Client) error {
			pgtest.SetClock(t, pool, time.Now().Add(time.Minute+time.Second))
			return nil
		},
		holds.Released: func(pool *pgxpool.Pool, c *metered.Client) error {
			return end(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := c.Holds.Release(t.Context(), tx, holds.Release{IDs: []string{"h"}})
				return err
			})
		},
		holds.Captured: func(pool *pgxpool.Pool, c *metered.Client) error {
			return end(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := c.Holds.Capture(t.Context(), tx, holds.Capture{IDs: []string{"h"}})
				return err
			})
		},
	} {
		pool, c := setUp(t, metered.Config{})
		job := submit(t, c, 5)
		require.NoError(t, lose(pool, c))
		workHeld(t, pool, c, metered.HeldOptions{}, func(context.Context, *rendering) (metered.Cost, error) {
			t.Error("the work was done")
			return metered.Cost{}, nil
		})
		awaitJob(t, pool, job, "cancelled")
		require.Equal(t, state, booksOf(t, pool, c, job).Hold)
	}
}

func TestHeldWorker_AHoldThatExpiresDuringTheWorkChargesNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Holds: holds.Config{MaxTTL: time.Minute, MaxLifetime: 90 * time.Second}})
	clock := pgtest.SetClock(t, pool, time.Now())
	job := submit(t, c, 5)
	workHeld(t, pool, c, metered.HeldOptions{Timeout: time.Hour}, func(ctx context.Context, j *rendering) (metered.Cost, error) {
		h, err := c.Holds.Get(ctx, pool, "", "h", "")
		if err != nil || h.Remaining() != 90*time.Second { // its ceiling
			t.Errorf("%v is left: %v", h.Remaining(), err)
		}
		clock.Advance(90 * time.Second)
		return costs(7, holds.OverAllowed)(ctx, j)
	})
	awaitJob(t, pool, job, "cancelled")
	require.Equal(t, holds.Expired, booksOf(t, pool, c, job).Hold)
	require.Zero(t, booksOf(t, pool, c, job).Spent)
	require.Zero(t, booksOf(t, pool, c, job).Rows)
}

// Another hold than the job's own is the work's business.
func TestHeldWorker_TheStateOfAnotherHoldIsAnOrdinaryFailure(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	workHeld(t, pool, c, metered.HeldOptions{}, func(context.Context, *rendering) (metered.Cost, error) {
		return metered.Cost{}, &holds.StateError{ID: "other", State: holds.Expired}
	})
	awaitJob(t, pool, job, "discarded")
	require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job))
}

func TestHeldWorker_WriteCannotEndTheTransaction(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	workHeld(t, pool, c, metered.HeldOptions{}, func(context.Context, *rendering) (metered.Cost, error) {
		return metered.Cost{Lines: []holds.Line{room("gpu", 7, 100)}, Write: func(ctx context.Context, tx pgx.Tx) error {
			if err := tx.Commit(ctx); !errors.Is(err, metered.ErrTxControl) {
				t.Errorf("commit: %v", err)
			}
			_, err := tx.Exec(ctx, "commit")
			return err
		}}, nil
	})
	awaitJob(t, pool, job, "discarded")
	require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job))
}

package jobs_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestHeldWorker_AFailedAttemptStaysHeldUntilTheNext(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	job := submit(t, c, 3)
	var runs atomic.Int64
	opts := jobs.WorkerOptions{Timeout: 5 * time.Minute, RetryAfter: time.Hour, Margin: 20 * time.Minute}
	left := func() time.Duration {
		h, err := c.Holds.Get(context.Background(), pool, "", "h", "")
		if err != nil {
			t.Error(err)
		}
		return h.Remaining()
	}
	atStart := make(chan time.Duration, 3)
	workHeld(t, pool, c, opts, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
		atStart <- left()
		if runs.Add(1) < 3 {
			clock.Advance(opts.Timeout + opts.Margin - time.Second) // the latest that it can be
			return jobs.JobCost{}, errOwn
		}
		return costs(7, holds.OverRefused)(ctx, j)
	})
	for range 2 {
		awaitJob(t, pool, job, "retryable")
		require.Equal(t, opts.Timeout+opts.Margin, <-atStart)
		require.Equal(t, opts.RetryAfter+opts.Margin, left())
		clock.Advance(opts.RetryAfter + opts.Margin - time.Second)
		_, err := pool.Exec(t.Context(), `update river_job set state = 'available', scheduled_at = now() where id = $1`, job)
		require.NoError(t, err)
	}
	awaitJob(t, pool, job, "completed")
	require.Equal(t, opts.Timeout+opts.Margin, <-atStart)
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
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
		t.Run(reason, func(t *testing.T) {
			pool, c := setUp(t, metered.Config{})
			job := submit(t, c, test.attempts)
			workHeld(t, pool, c, jobs.WorkerOptions{}, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
				return jobs.JobCost{}, test.end(ctx, river.ClientFromContext[pgx.Tx](ctx), j)
			})
			awaitJob(t, pool, job, test.job)
			require.Equal(t, books{Job: test.job, Hold: holds.Released}, booksOf(t, pool, c, job), reason)
			require.Equal(t, strings.TrimSpace(reason), lastEvent(t, pool, c).Note.Reason)
		})
	}
}

// A hold in its grace is captured, as long as it is held.
func TestHeldWorker_AJobIsWorkedInTheGraceOfItsHold(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	out, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		id, err := tx.Place(ctx, holds.Placement{ID: "h", TTL: time.Minute, Grace: time.Hour, Lines: []holds.Line{room("gpu", 10, 100)}}, nil)
		if err != nil {
			return 0, err
		}
		job, err := tx.Enqueue(ctx, render{jobs.HoldRef{ID: id}}, nil)
		return job.JobID, err
	})
	require.NoError(t, err)
	clock.Advance(2 * time.Minute)
	workHeld(t, pool, c, jobs.WorkerOptions{}, costs(7, holds.OverRefused))
	awaitJob(t, pool, out.Result, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, out.Result))
}

// The workers act for the program, and say so: a book that demands holders and actors, and has no ceiling, is
// no obstacle to them, whether the job costs something or nothing, or the hold expires.
func TestHeldWorker_ActsForTheProgramWithAnyBook(t *testing.T) {
	t.Parallel()
	for want, work := range map[holds.State]renders{
		holds.Captured: costs(7, holds.OverRefused),
		holds.Released: func(context.Context, *rendering) (jobs.JobCost, error) {
			return jobs.JobCost{Nothing: true}, nil
		},
		holds.Expired: nil,
	} {
		t.Run(string(want), func(t *testing.T) {
			pool, c := setUp(t, metered.Config{Holds: holds.Config{RequireHolder: true, RequireActor: true, NoCeiling: true}})
			clock := pgtest.SetClock(t, pool, time.Now())
			note := budget.Note{Actor: "user:ann"}
			out, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
				_, err := tx.Place(ctx, holds.Placement{ID: "other", TTL: time.Minute, Lines: []holds.Line{room("gpu", 10, 100)}, Note: note}, nil)
				require.ErrorIs(t, err, budget.ErrArgument, "the program itself is held to it")
				id, err := tx.Place(ctx, holds.Placement{ID: "h", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("gpu", 10, 100)}, Note: note}, &jobs.Cleanup{})
				if err != nil || work == nil {
					return 0, err
				}
				job, err := tx.Enqueue(ctx, render{jobs.HoldRef{ID: id}}, nil)
				return job.JobID, err
			})
			require.NoError(t, err)
			if work != nil {
				workHeld(t, pool, c, jobs.WorkerOptions{Timeout: 100 * time.Hour}, work)
				awaitJob(t, pool, out.Result, "completed")
				deadline := pgtest.Value[time.Time](t, pool, `select deadline from metered.holds`)
				require.Greater(t, deadline.Sub(clock.Now()), 99*time.Hour, "it covers the attempt")
			} else {
				clock.Advance(time.Minute)
				job := pgtest.Value[int64](t, pool, `update river_job set state = 'available', scheduled_at = now() returning id`)
				workers := river.NewWorkers()
				river.AddWorker(workers, jobs.NewCleanupWorker(pool, c.Holds))
				startWorkers(t, pool, workers)
				awaitJob(t, pool, job, "completed")
			}
			h, err := c.Holds.Get(t.Context(), pool, "", "h", "")
			require.NoError(t, err)
			require.Equal(t, want, h.State)
			require.Contains(t, lastEvent(t, pool, c).Note.Actor, "job:")
		})
	}
}

// Neither the work nor the hold is given up because somebody has the scope for a moment.
func TestHeldWorker_ABusyScopeIsWaitedForBeforeTheWorkAndAfter(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}})
	job := submit(t, c, 1)
	release := pgtest.LockScope(t, pool, c, "gpu")
	refused := func(times int) { // that often the lock timeout has run out
		for range times {
			pgtest.WaitQueued(t, pool, 1)
			pgtest.WaitQueued(t, pool, 0)
		}
	}
	working, failing := make(chan bool), make(chan bool)
	workHeld(t, pool, c, jobs.WorkerOptions{}, func(context.Context, *rendering) (jobs.JobCost, error) {
		working <- true
		<-failing
		return jobs.JobCost{}, errOwn
	})
	refused(2)
	release()
	<-working
	release = pgtest.LockScope(t, pool, c, "gpu")
	failing <- true
	refused(2)
	release()
	awaitJob(t, pool, job, "discarded")
	require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job))
}

func TestHeldWorker_APanicThatIsNotTheLastKeepsTheHoldAndItsTrace(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 2)
	var runs atomic.Int64
	workHeld(t, pool, c, jobs.WorkerOptions{RetryAfter: time.Millisecond}, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
		if runs.Add(1) == 1 {
			panics()
		}
		return costs(7, holds.OverRefused)(ctx, j)
	})
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
	require.Contains(t, pgtest.Value[string](t, pool, `select errors[1]->>'trace' from river_job where id = $1`, job), "jobs_test.panics")
}

func panics() { panic("oh") }

func TestHeldWorker_ASnoozedJobStaysHeldUntilItRuns(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	pgtest.SetClock(t, pool, time.Now())
	job := submit(t, c, 1)
	workHeld(t, pool, c, jobs.WorkerOptions{Margin: 7 * time.Minute}, func(context.Context, *rendering) (jobs.JobCost, error) {
		return jobs.JobCost{}, river.JobSnooze(time.Hour)
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
	client := workHeld(t, pool, c, jobs.WorkerOptions{}, func(ctx context.Context, _ *rendering) (jobs.JobCost, error) {
		close(running)
		<-ctx.Done()
		return jobs.JobCost{}, ctx.Err()
	})
	<-running
	stopWorkers(t, client)
	require.Equal(t, books{Job: "available", Hold: holds.Held, Held: 10}, booksOf(t, pool, c, job))
	workHeld(t, pool, c, jobs.WorkerOptions{}, costs(7, holds.OverRefused))
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
				_, err := c.Holds.Capture(t.Context(), tx, holds.Capture{IDs: []string{"h"}, All: true})
				return err
			})
		},
	} {
		pool, c := setUp(t, metered.Config{})
		job := submit(t, c, 5)
		require.NoError(t, lose(pool, c))
		workHeld(t, pool, c, jobs.WorkerOptions{}, func(context.Context, *rendering) (jobs.JobCost, error) {
			t.Error("the work was done")
			return jobs.JobCost{}, nil
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
	workHeld(t, pool, c, jobs.WorkerOptions{Timeout: time.Hour}, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
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
	workHeld(t, pool, c, jobs.WorkerOptions{}, func(context.Context, *rendering) (jobs.JobCost, error) {
		return jobs.JobCost{}, &holds.StateError{ID: "other", State: holds.Expired}
	})
	awaitJob(t, pool, job, "discarded")
	require.Equal(t, books{Job: "discarded", Hold: holds.Released}, booksOf(t, pool, c, job))
}

func TestHeldWorker_WriteCannotKeepTheTransaction(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 1)
	kept := make(chan pgx.Tx, 1)
	workHeld(t, pool, c, jobs.WorkerOptions{}, func(context.Context, *rendering) (jobs.JobCost, error) {
		return jobs.JobCost{Nothing: true, Write: func(_ context.Context, tx pgx.Tx) error { kept <- tx; return nil }}, nil
	})
	awaitJob(t, pool, job, "completed")
	_, err := (<-kept).Exec(t.Context(), "select 1")
	require.ErrorIs(t, err, guardtx.ErrDone)
}

package jobs

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/holds"
)

// Cleanup is a job that ends a hold when it is due: metered.Tx.Place and Claim enqueue it.
type Cleanup struct {
	// Delay is the time from Hold.Due to the job, up to 24h. Defaults to 10s.
	Delay time.Duration

	// Queue is the job's queue. Defaults to River's default queue.
	Queue string

	// MaxAttempts is up to 32,767. Defaults to River's default, 25.
	MaxAttempts int
}

const defaultDelay = 10 * time.Second

// CleanupJob returns a job, and how to insert it, for a hold that is placed now, for ttl with its
// grace.
func (internals) CleanupJob(c Cleanup, tenant, id string,
	ttl time.Duration) (CleanupArgs, river.InsertOpts, error) {
	delay := cmp.Or(c.Delay, defaultDelay)
	if delay < 0 || delay > 24*time.Hour {
		return CleanupArgs{}, river.InsertOpts{}, invalid("Cleanup.Delay", "%v is not from 0 to 24h", c.Delay)
	}
	if c.MaxAttempts < 0 || c.MaxAttempts > math.MaxInt16 {
		return CleanupArgs{}, river.InsertOpts{},
			invalid("Cleanup.MaxAttempts", "%d is not from 0 to %d", c.MaxAttempts, math.MaxInt16)
	}
	args := CleanupArgs{Tenant: tenant, ID: id, DelayMS: delay.Milliseconds()}
	return args, river.InsertOpts{Queue: c.Queue, MaxAttempts: c.MaxAttempts,
		ScheduledAt: time.Now().Add(ttl + delay)}, nil
}

// CleanupArgs are the args of a Cleanup. A river.Client without its worker fails the job.
type CleanupArgs struct {
	// Tenant is the hold's tenant.
	Tenant string `json:"tenant,omitempty"`

	// ID is the hold's id.
	ID string `json:"id"`

	// DelayMS is Cleanup.Delay in milliseconds.
	DelayMS int64 `json:"delay_ms"`
}

// Kind is the job's kind in River.
func (CleanupArgs) Kind() string { return "metered_hold_cleanup" }

// NewCleanupWorker returns the worker of CleanupArgs, which calls holds.Book.Expire. If the hold is
// not due yet, the job is snoozed until it is.
func NewCleanupWorker(pool *pgxpool.Pool, book *holds.Book) river.Worker[CleanupArgs] {
	return &cleanupWorker{pool: pool, book: book}
}

type cleanupWorker struct {
	river.WorkerDefaults[CleanupArgs]
	pool *pgxpool.Pool
	book *holds.Book
}

// Work runs a job.
func (w *cleanupWorker) Work(ctx context.Context, job *river.Job[CleanupArgs]) error {
	if err := workable(w.pool, w.book); err != nil {
		return err
	}
	h, err := w.book.Get(ctx, w.pool, job.Args.Tenant, job.Args.ID, "")
	if err == nil && h.State == holds.Expired {
		err = through(ctx, w.book, w.pool, func(tx pgx.Tx) error {
			h, _, err = w.book.Expire(ctx, tx, holds.Expire{
				Tenant: job.Args.Tenant, ID: job.Args.ID, Deadline: h.Deadline,
				Note: note(job.JobRow, job.Args.Tenant, ""),
			})
			return err
		})
	}
	switch {
	case errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired):
		return nil
	case err != nil:
		return err
	case h.State == holds.Held:
		delay := time.Duration(job.Args.DelayMS) * time.Millisecond
		return river.JobSnooze(h.Due.Sub(h.Now) + delay)
	}
	return nil
}

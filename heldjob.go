package metered

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// HeldArgs are the args of a job whose estimated cost is held until its actual cost is
// known: they say by which hold.
type HeldArgs interface {
	river.JobArgs
	HeldBy() HoldRef
}

// HoldRef names a hold.
type HoldRef struct {
	Tenant string `json:"tenant,omitempty"`
	ID     string `json:"id"`
}

// Cost is what a job came to.
type Cost struct {
	// Lines are what was used, by scope, as in holds.Capture. Defaults to none: nothing
	// was used, and nothing is charged.
	Lines []holds.Line
	// Over says what becomes of a line beyond the estimate. Defaults to
	// holds.OverRefused: the job then fails.
	Over holds.Over
	// Entity is linked to the hold. Defaults to none.
	Entity string
	// Write makes the job's own writes, in the transaction that captures the cost and
	// completes the job. Defaults to none.
	Write func(ctx context.Context, tx pgx.Tx) error
}

// HeldWork does the work of a job, outside any transaction, and says what it came to.
// It may be called several times for one job, as any River worker may.
type HeldWork[T HeldArgs] func(ctx context.Context, job *river.Job[T]) (Cost, error)

// HeldOptions configures HeldWorker. The zero value is ready for use.
type HeldOptions struct {
	// Timeout bounds one attempt, as River's Worker.Timeout does. Defaults to 1m, as
	// River's.
	Timeout time.Duration
	// RetryAfter is how long until a failed job is tried again. Defaults to 30s. It is
	// held until then.
	RetryAfter time.Duration
}

// HeldWorker is a River worker for the pattern "hold the estimate, run the job, capture
// the actual cost":
//
//   - A command places the hold and enqueues the job (Tx.Place, Tx.Enqueue): both or
//     neither.
//   - The worker extends the hold so that it covers the attempt, and calls work.
//   - What work says it came to is captured, its writes are made and the job is
//     completed in one transaction: never charged twice, nor for work that was not
//     recorded.
//   - If work fails, and the job will be tried again, the hold is extended to cover
//     that. If it fails for the last time, or is cancelled while it runs, the hold is
//     released.
//   - If the worker dies, or the job is cancelled or discarded where no worker sees it,
//     nobody extends the hold, and it expires.
//
// A job that finds its hold captured, released or expired is cancelled (a *river.
// JobCancelError over a *holds.StateError): its cost could not be charged. So choose
// the hold's TTL for the time a job waits in its queue, and Config.Holds.MaxLifetime for
// all of its attempts.
func HeldWorker[T HeldArgs](c *Client, work HeldWork[T], opts HeldOptions) river.Worker[T] {
	return &heldWorker[T]{
		client: c, work: work,
		timeout: orDefault(opts.Timeout, time.Minute), retryAfter: orDefault(opts.RetryAfter, 30*time.Second),
	}
}

type heldWorker[T HeldArgs] struct {
	river.WorkerDefaults[T]
	client              *Client
	work                HeldWork[T]
	timeout, retryAfter time.Duration
}

// Timeout is HeldOptions.Timeout.
func (w *heldWorker[T]) Timeout(*river.Job[T]) time.Duration { return w.timeout }

// NextRetry is HeldOptions.RetryAfter from now.
func (w *heldWorker[T]) NextRetry(*river.Job[T]) time.Time { return time.Now().Add(w.retryAfter) }

// Work runs an attempt.
func (w *heldWorker[T]) Work(ctx context.Context, job *river.Job[T]) error {
	ref := job.Args.HeldBy()
	defer func() {
		if p := recover(); p != nil { // River makes it an error of the attempt
			_ = w.failed(ctx, ref, job, fmt.Errorf("metered: panic: %v", p))
			panic(p)
		}
	}()
	if err := w.cover(ctx, ref, job, w.timeout+settleTime); err != nil {
		return w.failed(ctx, ref, job, err)
	}
	cost, err := w.work(ctx, job)
	if err == nil {
		err = w.settle(ctx, ref, job, cost)
	}
	if err != nil {
		return w.failed(ctx, ref, job, err)
	}
	return nil
}

// settleTime is what a hold lasts beyond the end of an attempt, for its transaction.
const settleTime = 10 * time.Second

// cover makes the hold last for so long from now.
func (w *heldWorker[T]) cover(ctx context.Context, ref HoldRef, job *river.Job[T], span time.Duration) error {
	book := w.client.Holds
	h, err := book.Get(ctx, w.client.pool, ref.Tenant, ref.ID, "")
	if err != nil {
		return err
	}
	if h.State != holds.Held {
		return &holds.StateError{ID: h.ID, State: h.State, Hold: h}
	}
	by := min(span-h.Remaining(), h.Ceiling.Sub(h.Deadline)).Round(time.Microsecond)
	if by <= 0 {
		return nil
	}
	return w.inTx(ctx, func(tx pgx.Tx) error {
		_, err := book.Extend(ctx, tx, holds.Extend{
			Tenant: ref.Tenant, IDs: []string{ref.ID}, By: by, Note: note(job),
		})
		return err
	})
}

// settle captures the cost and completes the job, together. A transaction that can be
// tried again is, since the work that was done cannot.
func (w *heldWorker[T]) settle(ctx context.Context, ref HoldRef, job *river.Job[T], cost Cost) (err error) {
	for n := 1; n <= w.client.cfg.MaxAttempts; n++ {
		if err = w.settleOnce(ctx, ref, job, cost); !retryable(err) || pause(ctx, n) != nil {
			return err
		}
	}
	return err
}

func (w *heldWorker[T]) settleOnce(ctx context.Context, ref HoldRef, job *river.Job[T], cost Cost) error {
	return w.inTx(ctx, func(tx pgx.Tx) error {
		if cost.Write != nil {
			if err := cost.Write(ctx, tx); err != nil {
				return err
			}
		}
		var err error
		ids := []string{ref.ID}
		if len(cost.Lines) == 0 {
			_, err = w.client.Holds.Release(ctx, tx, holds.Release{Tenant: ref.Tenant, IDs: ids, Note: note(job)})
		} else {
			_, err = w.client.Holds.Capture(ctx, tx, holds.Capture{
				Tenant: ref.Tenant, IDs: ids, Lines: cost.Lines, Over: cost.Over, Entity: cost.Entity, Note: note(job),
			})
		}
		if err != nil {
			return err
		}
		_, err = river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
}

// failed decides what becomes of the hold of an attempt that failed, and returns what
// River is to hear.
func (w *heldWorker[T]) failed(ctx context.Context, ref HoldRef, job *river.Job[T], err error) error {
	if errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired) {
		return river.JobCancel(fmt.Errorf("metered: the job is not held any more: %w", err))
	}
	remotely := errors.Is(context.Cause(ctx), river.ErrJobCancelledRemotely)
	// ctx may be what ended the attempt; there is an end to this, too.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	var cancelled *river.JobCancelError
	var snooze *river.JobSnoozeError
	var after error
	switch {
	case errors.As(err, &snooze):
		after = w.cover(ctx, ref, job, snooze.Duration+settleTime)
	case errors.As(err, &cancelled), remotely, job.Attempt >= job.MaxAttempts:
		after = w.inTx(ctx, func(tx pgx.Tx) error {
			_, err := w.client.Holds.Release(ctx, tx, holds.Release{Tenant: ref.Tenant, IDs: []string{ref.ID}, Note: note(job)})
			return err
		})
	default:
		after = w.cover(ctx, ref, job, w.retryAfter+settleTime)
	}
	if after != nil {
		return errors.Join(err, fmt.Errorf("metered: the hold expires by itself: %w", after))
	}
	return err
}

func (w *heldWorker[T]) inTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, w.client.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, fn)
}

func note[T river.JobArgs](job *river.Job[T]) budget.Note {
	return budget.Note{Actor: holds.Job(job.Kind), Correlation: fmt.Sprintf("job %d, attempt %d", job.ID, job.Attempt)}
}

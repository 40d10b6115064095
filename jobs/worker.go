package jobs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/schema"
)

// workable refuses a worker without a pool or a book.
func workable(pool *pgxpool.Pool, book *holds.Book) error {
	if err := cmp.Or(notNil("pool", pool), notNil("book", book)); err != nil {
		return err
	}
	return fault.Made(errArgument, "book", inHolds.Schema(book) != schema.Name{})
}

// HeldArgs are the args of a job that names its hold, for jobs without Options.Hold.
type HeldArgs interface {
	river.JobArgs
	HeldBy() HoldRef
}

// HoldRef names a hold.
type HoldRef struct {
	// Tenant is the hold's tenant.
	Tenant string `json:"tenant,omitempty"`

	// ID is the hold's id.
	ID string `json:"id"`
}

// JobCost is the actual cost of a job. One of Lines, All and Nothing is required.
type JobCost struct {
	// Lines are the used units, as in holds.Capture. They may stand beside All.
	Lines []holds.Line

	// All captures all held units.
	All bool

	// Nothing releases the hold.
	Nothing bool

	// Over says what happens to a Line beyond the estimate. With holds.OverRefused, the default,
	// such a job fails at each attempt.
	Over holds.Over

	// Entity is as in holds.Capture.
	Entity string

	// Write makes the job's writes, in the transaction that captures the cost. It may be called
	// several times, and must have no effect elsewhere.
	Write func(ctx context.Context, tx pgx.Tx) error
}

func (c JobCost) check() error {
	said := 0
	for _, is := range []bool{len(c.Lines) > 0 && !c.All, c.All, c.Nothing} {
		if is {
			said++
		}
	}
	if said != 1 {
		return invalid("JobCost", "says %d of Lines, All and Nothing, want one", said)
	}
	return nil
}

// WorkerOptions configures NewWorker. Durations that are not positive are the default.
type WorkerOptions struct {
	// Timeout bounds an attempt. Defaults to 1m.
	Timeout time.Duration

	// RetryAfter is the time until a failed job is tried again. Defaults to 30s.
	RetryAfter time.Duration

	// Margin is how much longer than an attempt and the pause after it the hold lasts: the job's
	// time in its queue. Defaults to 1m.
	//
	// A job of a killed worker goes to another after river.Config.RescueStuckJobsAfter, 1h. To have
	// it tried again, and not cancelled, set that lower, and Margin half a minute higher.
	Margin time.Duration
}

// NewWorker returns a River worker for the pattern "hold the estimate, run the job, capture the
// actual cost":
//
//   - A command enqueues the job with Options.Hold, or places the hold and enqueues a job with
//     HeldArgs.
//   - The worker extends the hold to cover the attempt, and calls work outside any transaction. It
//     returns the cost, and may be called several times.
//   - One transaction captures the cost, makes work's writes and completes the job. It is retried
//     while the attempt lasts, unless the job is at fault.
//   - If work fails, the hold is extended for the next attempt. After the last one, or if the
//     running job is cancelled, it is released.
//   - If the worker dies, or the job is cancelled or discarded elsewhere, the hold expires.
//
// A job without an open hold is cancelled. So the hold's TTL must be longer than a job waits in its
// queue, and holds.Config.MaxLifetime longer than all its attempts. An Options.Hold without a
// TTL lasts until the job ends. A job whose hold has moved with its tenant (package cells) is
// snoozed for WorkerOptions.RetryAfter, until the tenant is back.
//
// Locks: those of JobCost.Write and the job's row, then the hold's scopes, until COMMIT.
func NewWorker[T river.JobArgs](pool *pgxpool.Pool, book *holds.Book,
	work func(ctx context.Context, job *river.Job[T]) (JobCost, error), opts WorkerOptions) river.Worker[T] {
	return &worker[T]{pool: pool, book: inHolds.AnyHolder(book), work: work, opts: WorkerOptions{
		Timeout:    cmp.Or(max(opts.Timeout, 0), time.Minute),
		RetryAfter: cmp.Or(max(opts.RetryAfter, 0), 30*time.Second),
		Margin:     cmp.Or(max(opts.Margin, 0), time.Minute),
	}}
}

type worker[T river.JobArgs] struct {
	river.WorkerDefaults[T]
	pool *pgxpool.Pool
	book *holds.Book
	work func(ctx context.Context, job *river.Job[T]) (JobCost, error)
	opts WorkerOptions
}

// Timeout is WorkerOptions.Timeout.
func (w *worker[T]) Timeout(*river.Job[T]) time.Duration { return w.opts.Timeout }

// NextRetry is WorkerOptions.RetryAfter from now.
func (w *worker[T]) NextRetry(*river.Job[T]) time.Time { return time.Now().Add(w.opts.RetryAfter) }

var errPanicked = errors.New("jobs: the work panicked")

// Work runs an attempt.
func (w *worker[T]) Work(ctx context.Context, job *river.Job[T]) error {
	if err := cmp.Or(workable(w.pool, w.book), notNil("work", w.work)); err != nil {
		return err
	}
	returned := false
	defer func() {
		if !returned { // a panic, which goes on to River unchanged
			_ = w.failed(ctx, job, errPanicked)
		}
	}()
	err := w.attempt(ctx, job)
	returned = true
	if err != nil {
		return w.failed(ctx, job, err)
	}
	return nil
}

func (w *worker[T]) attempt(ctx context.Context, job *river.Job[T]) error {
	err := persist(ctx, func() (bool, error) {
		err := w.cover(ctx, job, w.opts.Timeout+w.opts.Margin)
		return inTheWay(err), err
	})
	if err != nil {
		return err
	}
	cost, err := w.work(ctx, job)
	if err == nil {
		err = cost.check()
	}
	if err != nil {
		return err
	}
	return w.settle(ctx, job, cost)
}

// heldBy is the hold of a job: the one that its args name, or that of its Options.Hold.
func heldBy[T river.JobArgs](job *river.Job[T]) HoldRef {
	if args, ok := any(job.Args).(HeldArgs); ok && args.HeldBy().ID != "" {
		return args.HeldBy()
	}
	return HoldRef{Tenant: Of(job.JobRow).Tenant, ID: Of(job.JobRow).Hold}
}

// notHeldError means that the job's hold has ended.
type notHeldError struct{ cause error }

func (e *notHeldError) Error() string {
	return fmt.Sprintf("jobs: the job is not held any more: %v", e.cause)
}

func (e *notHeldError) Unwrap() error { return e.cause }

// awayError means that the job's hold is in another cell.
type awayError struct{ cause error }

func (e *awayError) Error() string { return fmt.Sprintf("jobs: the job's hold: %v", e.cause) }

func (e *awayError) Unwrap() error { return e.cause }

// ofHold marks an error about the job's own hold. The work may have other holds, whose errors are
// ordinary failures.
func ofHold(err error) error {
	if errors.Is(err, fault.ErrMoved) {
		return &awayError{err}
	}
	if errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired) {
		return &notHeldError{err}
	}
	return err
}

// persist calls f until it says not to do so again, or ctx is done.
func persist(ctx context.Context, f func() (again bool, err error)) error {
	return pause.Loop("jobs", func(int) (context.Context, error) {
		again, err := f()
		if !again {
			return nil, err
		}
		return ctx, err
	})
}

// cover extends the hold to last for span from now, or to its ceiling. A hold in its grace cannot
// be extended, and can be captured while the grace lasts.
func (w *worker[T]) cover(ctx context.Context, job *river.Job[T], span time.Duration) error {
	book, ref := w.book, heldBy(job)
	if ref.ID == "" {
		return &notHeldError{errors.New("it was enqueued without a hold")}
	}
	h, err := book.Get(ctx, w.pool, ref.Tenant, ref.ID, "")
	if err == nil && h.State != holds.Held {
		err = &holds.StateError{ID: h.ID, State: h.State, Hold: h}
	}
	by := time.Microsecond // Extend knows whether an unknown hold has moved
	switch {
	case errors.Is(err, holds.ErrUnknown):
	case err != nil:
		return ofHold(err)
	case h.Remaining() <= 0:
		return nil
	default:
		if by = span - h.Remaining(); !h.Ceiling.IsZero() {
			by = min(by, h.Ceiling.Sub(h.Deadline))
		}
		if by = by.Truncate(time.Microsecond); by <= 0 {
			return nil
		}
	}
	return w.inTx(ctx, func(tx pgx.Tx) error {
		_, err := book.Extend(ctx, tx, holds.Extend{
			Tenant: ref.Tenant, IDs: []string{ref.ID}, By: by, Note: note(job.JobRow, ref.Tenant, ""),
		})
		return ofHold(err)
	})
}

// failTime bounds the work on the hold of a failed attempt.
const failTime = 10 * time.Second

// failed extends or releases the hold of a failed attempt, and returns the error for River.
func (w *worker[T]) failed(ctx context.Context, job *river.Job[T], err error) error {
	if gone := (*notHeldError)(nil); errors.As(err, &gone) {
		return river.JobCancel(err)
	}
	if errors.Is(err, errNotRunning) {
		return err // the worker that has the job now has the hold, too
	}
	if away := (*awayError)(nil); errors.As(err, &away) {
		return river.JobSnooze(w.opts.RetryAfter)
	}
	span, reason := w.next(ctx, job, err)
	// The end of ctx may be why the attempt failed.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), failTime)
	defer cancel()
	after := persist(ctx, func() (bool, error) {
		var err error
		if reason == "" {
			err = w.cover(ctx, job, span)
		} else {
			err = w.inTx(ctx, func(tx pgx.Tx) error { return w.release(ctx, tx, job, reason) })
		}
		return inTheWay(err), err
	})
	if after != nil {
		return errors.Join(err, fmt.Errorf("jobs: the hold is left to expire: %w", after))
	}
	return err
}

// next is how long the hold has to last after a failed attempt, or else the reason to release it.
// The cases stand in the order in which River decides about the job.
func (w *worker[T]) next(ctx context.Context, job *river.Job[T],
	err error) (span time.Duration, reason string) {
	var snooze *river.JobSnoozeError
	var cancelled *river.JobCancelError
	switch {
	case errors.Is(context.Cause(ctx), river.ErrJobCancelledRemotely):
		return 0, "cancelled"
	case errors.As(err, &snooze):
		return snooze.Duration + w.opts.Margin, ""
	case errors.As(err, &cancelled):
		return 0, "cancelled by its work"
	case errors.Is(ctx.Err(), context.Canceled) &&
		(errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))):
		return w.opts.Margin, "" // the client is stopping, which does not count as an attempt
	case job.Attempt >= job.MaxAttempts:
		return 0, "failed for the last time"
	}
	return w.opts.RetryAfter + w.opts.Margin, ""
}

func (w *worker[T]) release(ctx context.Context, tx pgx.Tx, job *river.Job[T], reason string) error {
	ref := heldBy(job)
	_, err := w.book.Release(ctx, tx, holds.Release{Tenant: ref.Tenant, IDs: []string{ref.ID},
		Note: note(job.JobRow, ref.Tenant, reason)})
	return ofHold(err)
}

func (w *worker[T]) inTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return through(ctx, w.book, w.pool, fn)
}

// through runs fn in a transaction of its own, past what is due in the scopes of a hold.
func through(ctx context.Context, book *holds.Book, pool *pgxpool.Pool, fn func(pgx.Tx) error) error {
	return inHolds.Through(ctx, book, pool, func() error {
		return commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, fn)
	})
}

// note says which attempt of a job it was.
func note(job *rivertype.JobRow, tenant, reason string) budget.Note {
	return budget.Note{
		Actor: "job:" + job.Kind, Tenant: tenant,
		Correlation: fmt.Sprintf("job %d, attempt %d", job.ID, job.Attempt), Reason: reason,
	}
}

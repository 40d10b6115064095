package metered

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/holds"
)

// CleanupArgs are the args of a job that ends one hold when its time is over. Tx.Place
// and Tx.Claim enqueue it if they are given a Cleanup; a program that places holds without a
// command can enqueue it itself. The job fails on a river.Client that works its queue
// without CleanupWorker, since its kind is not registered there.
type CleanupArgs struct {
	Tenant string `json:"tenant,omitempty"`
	ID     string `json:"id"`
	// DelayMS is how many milliseconds after the hold is due the job runs again, if it finds
	// that the hold is not due yet.
	DelayMS int64 `json:"delay_ms"`
}

// Kind is the job's kind.
func (CleanupArgs) Kind() string { return "metered_hold_cleanup" }

// CleanupWorker works CleanupArgs. Register it wherever the queue of such jobs is worked:
//
//	river.AddWorker(workers, client.CleanupWorker())
//
// It ends the hold and tells subscribers and listeners, once, however often the job
// runs. If the hold was captured or released, or is gone, it does nothing. If it was
// extended, or is not due yet by the database's clock, the job is snoozed until it is.
func (c *Client) CleanupWorker() river.Worker[CleanupArgs] { return &cleanupWorker{client: c} }

type cleanupWorker struct {
	river.WorkerDefaults[CleanupArgs]
	client *Client
}

// Work runs a job.
func (w *cleanupWorker) Work(ctx context.Context, job *river.Job[CleanupArgs]) error {
	if err := w.client.made(); err != nil {
		return err
	}
	book := w.client.Holds
	h, err := book.Get(ctx, w.client.pool, job.Args.Tenant, job.Args.ID, "")
	if err == nil && h.State == holds.Expired {
		err = pgx.BeginTxFunc(ctx, w.client.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			h, _, err = book.Expire(ctx, tx, holds.Expire{
				Tenant: job.Args.Tenant, ID: job.Args.ID, Deadline: h.Deadline, Note: note(job.JobRow, job.Args.Tenant, ""),
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

package jobs

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
)

// errNotRunning means that River took the job away from its worker: as stuck, or because somebody
// deleted it.
var errNotRunning = errors.New("jobs: the job is not running any more")

var errUnknown = errors.New("jobs: the answer to COMMIT was lost")

var errChanged = errors.New("jobs: the job was changed at the same time")

// settle captures the cost and completes the job in one transaction. It retries until the attempt's
// time is up, since the work cannot be done again. It also retries after a COMMIT with an unknown
// outcome. If that one succeeded, the hold is captured and the job completed, and River ignores the
// result of this attempt.
func (w *worker[T]) settle(ctx context.Context, job *river.Job[T], cost JobCost) error {
	return persist(ctx, func() (bool, error) { return w.settleOnce(ctx, job, cost) })
}

func (w *worker[T]) settleOnce(ctx context.Context, job *river.Job[T], cost JobCost) (again bool, err error) {
	lost := true
	once := func(conn *pgxpool.Conn) error {
		defer func() { lost = conn.Conn().IsClosed() }()
		tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		if err != nil {
			return err
		}
		return commit.Run(ctx, tx, "jobs", errUnknown,
			func(tx pgx.Tx) error { return w.settleIn(ctx, tx, job, cost) })
	}
	err = inHolds.Through(ctx, w.book, w.pool, func() error { return w.pool.AcquireFunc(ctx, once) })
	return err != nil && (lost || inTheWay(err) || errors.Is(err, errChanged) ||
		errors.Is(err, errUnknown)), err
}

// settleIn takes the scopes' locks last, for the shortest time.
func (w *worker[T]) settleIn(ctx context.Context, tx pgx.Tx, job *river.Job[T], cost JobCost) error {
	if cost.Write != nil {
		if err := w.write(ctx, tx, cost); err != nil {
			return err
		}
	}
	// A job that is not running is left unchanged, and returned as it is.
	done, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job) // by the driver of the client
	switch {
	case errors.Is(err, rivertype.ErrNotFound):
		return fmt.Errorf("%w: it was deleted", errNotRunning)
	case err != nil:
		return err
	case done.State == rivertype.JobStateRunning: // its state changed between the two statements: look again
		return errChanged
	case done.State != rivertype.JobStateCompleted:
		return fmt.Errorf("%w: it is %s", errNotRunning, done.State)
	}
	if cost.Nothing {
		return w.release(ctx, tx, job, "nothing was used")
	}
	ref := heldBy(job)
	_, err = w.book.Capture(ctx, tx, holds.Capture{
		Tenant: ref.Tenant, IDs: []string{ref.ID}, All: cost.All, Lines: cost.Lines, Over: cost.Over,
		Entity: cost.Entity, Note: note(job.JobRow, ref.Tenant, ""),
	})
	return ofHold(err)
}

// guardSQL makes COMMIT fail until the cursor is closed, as a command's guard does.
const guardSQL = `declare metered_write cursor with hold for select metered.block_commit()`

// write calls JobCost.Write with a transaction that it cannot end: its writes and the cost are
// committed together.
func (w *worker[T]) write(ctx context.Context, tx pgx.Tx, cost JobCost) error {
	if _, err := tx.Exec(ctx, inHolds.Schema(w.book).SQL(guardSQL)); err != nil {
		return fault.Failed("jobs", "write", err)
	}
	done := new(atomic.Bool)
	defer done.Store(true)
	if err := cost.Write(ctx, guardtx.New(tx, done)); err != nil {
		return err
	}
	if err := guardtx.Intact(ctx, tx.Conn().PgConn()); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "close metered_write"); err != nil { // after a ROLLBACK there is none
		return fault.Failed("jobs", "write", err)
	}
	return nil
}

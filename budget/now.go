package budget

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// maxAttempts is how often a transaction of this package's own is tried that fails with 40001 or 40P01.
const maxAttempts = 10

// ChargeNow makes one charge in a transaction of its own, in one round trip: a rate limiter whose answer is exact and
// durable. If it returns nil the charge is committed. On *ExceededError or *ScopeError nothing was written. It runs
// again after SQLSTATE 40001 or 40P01. On ErrCommitUnknown the connection was lost, or ctx ended, before the answer
// came: the charge may be committed or not. Limit.MaxFrom is refused.
//
// Where several goroutines charge, a Batcher is faster.
func (l *Ledger) ChargeNow(ctx context.Context, pool *pgxpool.Pool, charge Charge) (p Posted, err error) {
	if err := cmp.Or(l.made(), notNil("pool", pool)); err != nil {
		return Posted{}, err
	}
	if _, err := l.ask(charge); err != nil {
		return Posted{}, within("charge", err)
	}
	prepared, err := l.prepare(charge)
	if err != nil {
		return Posted{}, err
	}
	ctx, span := l.begin(ctx, "budget.charge_now")
	defer func() {
		l.observer.Never(ctx, err, ErrCommitUnknown)
		l.ended(ctx, span, err)
	}()
	call := prepared.Call
	for n := 1; ; n++ {
		var r Receipt
		err := l.alone(ctx, pool, func(conn *pgx.Conn) (err error) {
			r, err = call.Scan(conn.QueryRow(ctx, call.SQL, call.Args(ledger.Sending{WaitMS: l.waitMS()})...))
			return err
		})
		if errors.Is(err, ledger.ErrCrossing) {
			err = l.told(ctx, pool, func(tx pgx.Tx) (err error) {
				if r, err = call.Scan(tx.QueryRow(ctx, call.SQL, call.Args(ledger.Sending{WaitMS: l.waitMS(), Telling: true})...)); err == nil {
					err = l.tellCrossings(ctx, tx, r.Crossed)
				}
				return err
			})
		}
		if err == nil {
			return r.Entries[0], nil
		}
		if !sqlstate.Collided(err) || n == maxAttempts {
			return Posted{}, err
		}
		l.observer.Retried(ctx, err)
		if stopped := pause.Before(ctx, n); stopped != nil {
			return Posted{}, fmt.Errorf("budget: %w, while retrying: %w", stopped, err)
		}
	}
}

// alone runs one statement in a transaction of its own: the server commits it. An error that leaves open whether it did
// is ErrCommitUnknown.
func (l *Ledger) alone(ctx context.Context, pool *pgxpool.Pool, run func(*pgx.Conn) error) error {
	conn, err := l.observer.Acquire(ctx, pool)
	if err != nil {
		return fmt.Errorf("budget: connect: %w", err)
	}
	defer conn.Release()
	if err := ctx.Err(); err != nil {
		return pause.Ended(ctx) // else nobody could say whether it was sent
	}
	if err := run(conn.Conn()); err != nil {
		return outcome(conn.Conn(), err)
	}
	return nil
}

// told runs a call that crosses a threshold in a transaction of its own, which reports the crossing before it commits. Its errors are
// those of alone. An error of run rolls the transaction back.
func (l *Ledger) told(ctx context.Context, pool *pgxpool.Pool, run func(pgx.Tx) error) error {
	conn, err := l.observer.Acquire(ctx, pool)
	if err != nil {
		return fmt.Errorf("budget: connect: %w", err)
	}
	defer conn.Release()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("budget: begin: %w", err)
	}
	defer func() { // also on a panic. After COMMIT it does nothing
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		_ = tx.Rollback(ctx)
	}()
	if err = run(tx); err == nil {
		err = ctx.Err() // else nobody could say whether COMMIT was sent
	}
	if err != nil {
		return err
	}
	if err = tx.Commit(ctx); err != nil && !errors.Is(err, pgx.ErrTxCommitRollback) {
		return outcome(conn.Conn(), err)
	}
	return err
}

// undoTimeout bounds a rollback, which must also work when ctx is done.
const undoTimeout = 5 * time.Second

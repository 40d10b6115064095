package budget

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/sweep"
)

// maxAttempts is how often a transaction of this package's own is tried that fails with 40001 or
// 40P01.
const maxAttempts = 10

// ChargeNow makes a charge in its own transaction and one round trip, and retries SQLSTATE 40001
// and 40P01. After ErrCommitUnknown (a lost connection, or the end of ctx) it may be committed,
// after other errors it is not. A Batcher is faster for several goroutines.
func (l *Ledger) ChargeNow(ctx context.Context, pool *pgxpool.Pool, charge Charge) (p Posted, err error) {
	if err := cmp.Or(l.made(), notNil("pool", pool)); err != nil {
		return Posted{}, err
	}
	plain := charge
	plain.UpTo, plain.Lots = false, false
	if _, err := l.newItem(plain); err != nil {
		return Posted{}, within("charge", err)
	}
	call, err := l.prepareCharge(charge)
	if err != nil {
		return Posted{}, err
	}
	ctx, span := l.begin(ctx, "budget.charge_now")
	defer func() {
		l.observer.Never(ctx, err, ErrCommitUnknown)
		l.ended(ctx, span, err)
	}()
	var r Receipt
	err = pause.Collided(ctx, l.observer, "budget", maxAttempts, func() error {
		return sweep.Through(ctx, pool, l.schema, l.wait, func() error {
			return l.alone(ctx, pool, func(db Querier, telling bool) (crossed []Crossing, err error) {
				r, err = call.Scan(answer.QueryRow(ctx, db, call.SQL,
					call.Args(ledger.Sending{WaitMS: l.waitMS(), Telling: telling})...))
				return r.Crossed, err
			})
		})
	})
	if err != nil {
		return Posted{}, err
	}
	return r.Entries[0], nil
}

// alone runs one statement in a transaction of its own, which the server commits. If the statement
// crosses thresholds, it runs in one that reports them before it commits. An error that leaves open
// whether it committed is ErrCommitUnknown.
func (l *Ledger) alone(ctx context.Context, pool *pgxpool.Pool,
	run func(db Querier, telling bool) ([]Crossing, error)) error {
	return ledger.Silently(func(telling bool) error {
		pins := answer.Textual(pool)
		if !telling && !pins {
			return l.silent(ctx, pool, func(conn *pgx.Conn) error { _, err := run(answer.In(conn), false); return err })
		}
		return l.told(ctx, pool, func(tx pgx.Tx) error {
			if pins {
				if _, err := tx.Exec(ctx, answer.PinSQL); err != nil {
					return err
				}
			}
			crossed, err := run(tx, telling)
			if err == nil && telling {
				err = l.tellCrossings(ctx, tx, crossed)
			}
			return err
		})
	})
}

func (l *Ledger) silent(ctx context.Context, pool *pgxpool.Pool, run func(*pgx.Conn) error) error {
	conn, err := l.observer.Acquire(ctx, pool)
	if err != nil {
		return fmt.Errorf("budget: connect: %w", err)
	}
	defer conn.Release()
	if err := ctx.Err(); err != nil {
		return pause.Ended(ctx) // else nobody could say whether it was sent
	}
	if err := run(conn.Conn()); err != nil {
		err = outcome(conn.Conn(), err)
		commit.Leave(ctx, conn.Conn(), err)
		return err
	}
	return commit.Durable(ctx, ErrCommitUnknown)
}

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
	err = commit.Run(ctx, tx, "budget", ErrCommitUnknown, run)
	commit.Leave(ctx, conn.Conn(), err)
	return err
}

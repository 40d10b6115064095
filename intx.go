package metered

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// runIn runs op in a transaction of the caller's, between a savepoint and its
// release.
func (c *Client) runIn(ctx context.Context, tx pgx.Tx, op *operation, do work) (rec record, err error) {
	set, completed := false, false
	defer func() {
		if set && !completed { // on a panic too
			undo(ctx, tx)
		}
	}()
	b, set, err := c.beginIn(ctx, tx, op)
	if err != nil {
		return record{}, err
	}
	if b.status == statusReplay {
		set = false
		if err := endReplayIn(ctx, tx); err != nil {
			return record{}, err
		}
		return b.replay(op)
	}
	grant, err := b.admit(op)
	if err != nil {
		return record{}, err
	}
	cmdTx := c.newTx(op, tx, grant)
	raw, err := cmdTx.run(ctx, do)
	if err != nil {
		return record{}, err
	}
	rec, err = c.completeIn(ctx, tx, cmdTx, b.marker, raw)
	completed = err == nil
	return rec, err
}

// beginIn also tells whether its savepoint was set, and is to be undone.
func (c *Client) beginIn(ctx context.Context, tx pgx.Tx, op *operation) (b begun, set bool, err error) {
	b.marker = newMarker()
	batch := &pgx.Batch{}
	batch.Queue("savepoint metered_command")
	batch.Queue(c.sql.begin, c.beginArgs(ctx, op, b.marker, true, true, false)...)
	results := tx.SendBatch(ctx, batch)
	_, err = results.Exec()
	if err == nil {
		set = true
		err = results.QueryRow().Scan(b.dest()...)
	}
	switch err = firstOf(err, results.Close()); {
	case err == nil:
		return b, set, b.standing()
	case !set && sqlstate.Of(err) == sqlstate.InFailedTransaction:
		return b, set, fmt.Errorf("%w: %w", errAborted, err)
	}
	return b, set, failed("begin", ofBudget(op.charges, err))
}

func (c *Client) completeIn(ctx context.Context, tx pgx.Tx, cmdTx *Tx, marker string, raw []byte) (record, error) {
	if tx.Conn().PgConn().TxStatus() == 'E' {
		return record{}, ErrTxFailed
	}
	var done completion
	batch := &pgx.Batch{}
	locked := c.queueSteps(ctx, batch, cmdTx)
	telling := cmdTx.subscribed()
	batch.Queue(c.sql.complete, c.completeArgs(ctx, cmdTx, marker, raw, !telling)...)
	if !telling {
		batch.Queue(releaseSavepointSQL)
	}
	results := tx.SendBatch(ctx, batch)
	var err error
	if done.holds, err = readSteps(results, cmdTx, locked); err == nil {
		err = results.QueryRow().Scan(done.dest()...)
	}
	if err = firstOf(err, results.Close()); err != nil {
		return record{}, failed("complete", ofBudget(cmdTx.call, err))
	}
	if telling {
		if err := c.tellIn(ctx, tx, cmdTx, marker, done.holds); err != nil {
			return record{}, err
		}
	}
	return done.record(cmdTx, raw)
}

// tellIn tells subscribers, and then finishes the command.
func (c *Client) tellIn(ctx context.Context, tx pgx.Tx, cmdTx *Tx, marker string, done [][]holds.Hold) error {
	if err := cmdTx.tell(ctx, done); err != nil {
		return foreign("complete", err)
	}
	if err := guardtx.Intact(ctx, tx.Conn().PgConn()); err != nil {
		return err
	}
	batch := &pgx.Batch{}
	batch.Queue(c.sql.finish, marker)
	batch.Queue(releaseSavepointSQL)
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return failed("complete", err)
	}
	return nil
}

const releaseSavepointSQL = "release savepoint metered_command"

// undoSQL is one text, because a failed transaction can run the first statement but
// not prepare the second.
const undoSQL = "rollback to savepoint metered_command; release savepoint metered_command"

// undo takes the transaction back to where it was.
func undo(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	_, _ = tx.Exec(ctx, undoSQL, pgx.QueryExecModeSimpleProtocol)
}

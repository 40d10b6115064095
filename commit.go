package metered

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

const completeSQL = `
select seqs, ats, used, held, at
from metered.complete_command($1::text, $2::text, $3::text, $4::bytea, $5::timestamptz, $6::bytea,
    $7::text[], $8::bigint[], $9::bigint[], $10::int[], $11::bigint[], $12::interval[], $13::interval, $14::int, $15::text[])`

// completion is what complete_command returned.
type completion struct {
	seqs, used, held []int64
	ats              []time.Time
	at               time.Time
}

func (d *completion) dest() []any { return []any{&d.seqs, &d.ats, &d.used, &d.held, &d.at} }

func (d *completion) record(tx *Tx, raw []byte) (record, error) {
	rec := record{raw: raw, at: d.at}
	if tx.call == nil {
		return rec, nil
	}
	var err error
	rec.receipt, err = tx.call.Receipt(d.seqs, d.ats, d.used, d.held, nil)
	return rec, err
}

func (c *Client) completeArgs(ctx context.Context, tx *Tx, marker string, raw []byte) []any {
	op := tx.op
	args := []any{marker, op.command.Namespace, op.command.ID, op.fingerprint, op.issued, raw}
	if tx.call == nil {
		return append(args, []string{}, []int64{}, []int64{}, []int32{}, []int64{}, []pgtype.Interval{}, interval(0), 0, []string{})
	}
	charge := tx.call.Args()
	wait, _ := c.timeouts(ctx)
	charge[7] = wait
	return append(args, charge...)
}

// commit sends the last flush and says what became of it.
//
// Committed: COMMIT's own tag was seen. Not committed: nothing was sent; or an
// ERROR came, on whatever statement, and the server was ready again after it; or
// COMMIT was answered by ROLLBACK, which a batch reports without an error. All
// else is unknown, and in particular: pgconn.SafeToRetry says true of a connection
// lost while COMMIT waits, though the row may be there; and a pooler answers FATAL
// 08P01 for a commit that went through and for one that did not. With EarlyRelease
// COMMIT's tag is not enough: what comes after it must have come too, and until then
// it is unknown whether it stays.
func (c *Client) commit(ctx context.Context, conn *pgxpool.Conn, tx *Tx, marker string, raw []byte) (record, bool, error) {
	pg := conn.Conn().PgConn()
	switch {
	case ctx.Err() != nil:
		return record{}, false, fmt.Errorf("metered: before the commit: %w", context.Cause(ctx))
	case pg.IsClosed():
		return record{}, false, errors.New("metered: the connection was lost before the commit")
	case pg.IsBusy():
		return record{}, false, fmt.Errorf("%w: it left rows or a batch open", ErrTxFailed)
	case pg.TxStatus() == 'I':
		return record{}, false, fmt.Errorf("%w: it has ended", ErrTxControl)
	case pg.TxStatus() == 'E':
		return record{}, false, ErrTxFailed
	}
	var done completion
	early := tx.op.command.EarlyRelease
	batch := &pgx.Batch{}
	if early {
		batch.Queue(releaseSQL)
	}
	batch.Queue(c.sql.complete, c.completeArgs(ctx, tx, marker, raw)...)
	batch.Queue("commit")
	if early {
		batch.Queue(barrierSQL)
	}
	results := conn.SendBatch(ctx, batch)
	var err error
	if early {
		_, err = results.Exec()
	}
	if err == nil {
		err = results.QueryRow().Scan(done.dest()...)
	}
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = committed(results, early)
	}
	closeErr := results.Close()
	switch {
	case err == nil && tag.String() == "COMMIT":
		rec, err := done.record(tx, raw)
		return rec, false, err
	case err == nil && tag.String() == "ROLLBACK":
		return record{}, false, fmt.Errorf("%w: COMMIT was answered by ROLLBACK", ErrTxFailed)
	}
	if err = firstOf(err, closeErr); err == nil {
		err = fmt.Errorf("COMMIT was answered by %q", tag)
	}
	var pgErr *pgconn.PgError
	definite := errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && !pg.IsClosed() && !pg.IsBusy() &&
		tag.String() != "COMMIT"
	return record{}, !definite, failed("commit", ofBudget(tx.call, err))
}

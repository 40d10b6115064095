package metered

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/replica"
)

const completeSQL = `
select seqs, ats, used, held, at
from metered.complete_command($1::metered.new_command, $2::bytea, $3::bytea, $4::metered.new_charge[], $5::interval, $6::int, $7::bool)`

// finishSQL lets COMMIT pass where complete_command did not, because subscribers were
// to be told first.
const finishSQL = `select metered.finish_command($1::text)`

// completion is what complete_command returned.
type completion struct {
	seqs, used, held []int64
	ats              []time.Time
	at               time.Time
	holds            [][]holds.Hold // by call
}

func (d *completion) dest() []any { return []any{&d.seqs, &d.ats, &d.used, &d.held, &d.at} }

func (d *completion) record(tx *Tx, raw []byte) (record, error) {
	rec := record{raw: raw, at: d.at, holds: slices.Concat(d.holds...)}
	if tx.call == nil {
		return rec, nil
	}
	var err error
	rec.receipt, err = tx.call.Receipt(ledger.Answer{Seqs: d.seqs, Ats: d.ats, Used: d.used, Held: d.held})
	return rec, err
}

func (c *Client) completeArgs(ctx context.Context, tx *Tx, marker string, raw []byte, finishing bool) []any {
	charges, tolerance := sentCharges(tx.call)
	wait, _ := c.timeouts(ctx)
	return []any{c.sent(tx.op, marker).String(), tx.op.fingerprint, raw, charges, tolerance, wait, finishing}
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
	if err := guardtx.Intact(ctx, conn.Conn().PgConn()); err != nil {
		return record{}, false, err
	}
	var done completion
	var tag pgconn.CommandTag
	var lsn replica.LSN
	early, asked := tx.op.command.EarlyRelease, tx.op.command.LSN
	batch := &pgx.Batch{}
	if early {
		batch.Queue(releaseSQL)
	}
	locked := c.queueSteps(ctx, batch, tx)
	telling := tx.subscribed()
	batch.Queue(c.sql.complete, c.completeArgs(ctx, tx, marker, raw, !telling)...)
	if !telling {
		queueCommit(batch, early, asked)
	}
	results := conn.SendBatch(ctx, batch)
	var err error
	own := true // err is of a statement of ours, and not of COMMIT, where deferred triggers of others run
	if early {
		_, err = results.Exec()
	}
	if err == nil {
		done.holds, err = readSteps(results, tx, locked)
	}
	if err == nil {
		err = results.QueryRow().Scan(done.dest()...)
	}
	if telling {
		// Subscribers are told between the writes and COMMIT, which then has a flush of its
		// own. Until that flush the server refuses a COMMIT, so after an error nothing is
		// committed.
		if err = firstOf(err, results.Close()); err != nil {
			return record{}, false, failed("commit", ofBudget(tx.call, err))
		}
		if err = tx.tell(ctx, done.holds); err != nil {
			return record{}, false, foreign("commit", err)
		}
		if err = guardtx.Intact(ctx, conn.Conn().PgConn()); err != nil {
			return record{}, false, err
		}
		batch = &pgx.Batch{}
		batch.Queue(c.sql.finish, marker)
		queueCommit(batch, early, asked)
		results = conn.SendBatch(ctx, batch)
		_, err = results.Exec()
	}
	if err == nil {
		own = false
		tag, lsn, err = committed(results, early, asked)
	}
	closeErr := results.Close() // the server's error, also where err was made of it
	switch {
	case err == nil && tag.String() == "COMMIT":
		rec, err := done.record(tx, raw)
		rec.lsn = lsn
		return rec, false, err
	case err == nil && tag.String() == "ROLLBACK":
		return record{}, false, fmt.Errorf("%w: COMMIT was answered by ROLLBACK", ErrTxFailed)
	}
	if err = firstOf(err, closeErr); err == nil {
		err = fmt.Errorf("COMMIT was answered by %q", tag)
	}
	pg := conn.Conn().PgConn()
	var pgErr *pgconn.PgError
	definite := errors.As(closeErr, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" &&
		!pg.IsClosed() && !pg.IsBusy() && tag.String() != "COMMIT"
	if own {
		return record{}, !definite, failed("commit", ofBudget(tx.call, err))
	}
	return record{}, !definite, foreign("commit", err)
}

func queueCommit(batch *pgx.Batch, early, asked bool) {
	batch.Queue("commit")
	if asked {
		batch.Queue(lend.CommitLSN)
	}
	if early {
		batch.Queue(barrierSQL)
	}
}

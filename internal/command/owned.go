package command

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/replica"
)

// owned is a transaction of the engine's own.
type owned struct {
	conn *pgxpool.Conn
	op   *Operation
	pins bool // the transaction begins with answer.PinSQL
	bare pgx.Tx
	tag  pgconn.CommandTag // of COMMIT
	lsn  replica.LSN
}

func (o *owned) first(f *flush) {
	f.begin(pgx.TxOptions{IsoLevel: o.op.Isolation})
	if o.pins {
		f.exec(answer.PinSQL)
	}
}

func (o *owned) send(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	results := o.conn.SendBatch(ctx, batch)
	o.bare = results.Tx()
	return results
}

func (o *owned) aborted(error) error { return nil }

func (o *owned) tx() pgx.Tx { return o.bare }

func (o *owned) settings(timeoutMS int32) *int32 { return &timeoutMS }

// releaseSQL makes a transaction's COMMIT return, and let go of its locks, when its
// record is in the log, written to disk or not.
const releaseSQL = `select pg_catalog.set_config('synchronous_commit', 'off', true)`

// writeSQL makes a transaction one that writes, so that its COMMIT waits for the log, up to and
// including all that the transaction could see. Nobody reads the message. An id alone
// (pg_current_xact_id) would not do: COMMIT skips the flush of a transaction that logged nothing.
const writeSQL = `pg_catalog.pg_logical_emit_message(true, 'metered', ''::pg_catalog.text)`

// barrierSQL is a transaction of its own, which the flush commits. Its COMMIT waits as the
// session's synchronous_commit says: the disk, a standby's memory, its disk or its replay (local,
// remote_write, on, remote_apply). Where the session does not wait (off), it waits as with "on".
const barrierSQL = `select ` + writeSQL + `, case pg_catalog.current_setting('synchronous_commit')
	when 'off' then pg_catalog.set_config('synchronous_commit', 'on', true) end`

func (o *owned) early(f *flush) {
	if o.op.EarlyRelease {
		f.exec(releaseSQL)
	}
}

func (o *owned) end(batch *pgx.Batch) {
	batch.Queue("commit")
	if o.op.LSN {
		batch.Queue(ledger.EndSQL)
	}
	if o.op.EarlyRelease {
		batch.Queue(barrierSQL)
	}
}

// ended reads COMMIT's tag, the LSN, if it was asked for, and the barrier's tag, if there is one.
// With a nil error the tag says what happened. An error with COMMIT's tag means that it is
// committed and seen by others, but not known to be in the log on disk: a crash may take it back.
// Without early release the answers after COMMIT's tag do not matter.
func (o *owned) ended(results pgx.BatchResults) (foreign bool, err error) {
	o.tag, err = results.Exec()
	if err != nil || o.tag.String() != "COMMIT" {
		return true, err
	}
	if o.op.LSN {
		var text string
		if err = results.QueryRow().Scan(&text); err == nil {
			o.lsn, err = replica.ParseLSN(text)
		}
	}
	if !o.op.EarlyRelease {
		return true, nil
	}
	if err == nil {
		_, err = results.Exec()
	}
	if err == nil {
		err = results.Close() // the barrier's own COMMIT is before ReadyForQuery
	}
	if err != nil {
		err = fmt.Errorf("committed, but not known to be durable: %w", err)
	}
	return true, err
}

// outcome is the outcome of the last flush (commit.Of). With EarlyRelease COMMIT's tag is not
// enough: until the answers after it have come too, it is unknown whether the commit stays.
//
// A cancel request ends the wait of a COMMIT for a synchronous standby, and the server answers by
// its tag all the same, with a warning that pgx gives to the pool's owner alone. So where ctx has
// ended, which pgx may have sent such a request for, the tag is not enough either.
func (o *owned) outcome(ctx context.Context, rec *Record, unread, err, closing error) (unknown bool, _ error) {
	tag := o.tag.String()
	switch {
	case err == nil && tag == "COMMIT" && ctx.Err() != nil:
		return true, fmt.Errorf("committed, but not known to be on a standby: %w", pause.Ended(ctx))
	case err == nil && tag == "COMMIT" && unread != nil:
		return false, fmt.Errorf("%w: %w", fault.ErrUnread, unread)
	case err == nil && tag == "COMMIT":
		rec.LSN = o.lsn
		return false, nil
	case err == nil && tag == "ROLLBACK":
		return false, fmt.Errorf("%w: COMMIT was answered by ROLLBACK", guardtx.ErrFailed)
	}
	if err = firstOf(err, closing); err == nil {
		err = fmt.Errorf("COMMIT was answered by %q", tag)
	}
	// closing has the server's error, also where err was made of it.
	return closing == nil || commit.Of(o.conn.Conn().PgConn(), tag, closing) != commit.NotCommitted, err
}

// replay gives up the claim first, so that repetitions wait together.
func (o *owned) replay(ctx context.Context, rec *Record) (unknown bool, _ error) {
	if _, err := o.conn.Exec(ctx, "rollback; "+barrierSQL, pgx.QueryExecModeSimpleProtocol); err != nil || ctx.Err() != nil {
		return true, fmt.Errorf("metered: the operation's record is not known to be durable: %w", cmp.Or(err, ctx.Err()))
	}
	if o.op.LSN {
		rec.LSN, _ = replica.CommitLSN(ctx, o.conn)
	}
	return false, nil
}

// undoTimeout bounds cleaning up, which must also work when ctx is done. A
// connection that is not clean by then is closed, which rolls back as well.
const undoTimeout = 5 * time.Second

// undo comes before Release: the pool destroys a connection that comes back inside a transaction,
// and a flood of refusals would become one of connects.
func (o *owned) undo(ctx context.Context) {
	if o.conn.Conn().IsClosed() || o.conn.Conn().PgConn().TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	_, _ = o.conn.Exec(ctx, "rollback") // if it fails, Release closes the connection
}

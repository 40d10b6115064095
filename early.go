package metered

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/replica"
)

// releaseSQL makes a transaction's COMMIT return, and let go of its locks, when its
// record is in the log, written to disk or not.
const releaseSQL = `select pg_catalog.set_config('synchronous_commit', 'off', true)`

// writeSQL makes a transaction one that writes, so that its COMMIT waits for the log,
// up to and including all that the transaction could see. The message is read by
// nobody. An id alone (pg_current_xact_id) would not do: COMMIT skips the flush of a
// transaction that logged nothing.
const writeSQL = `pg_catalog.pg_logical_emit_message(true, 'metered', ''::pg_catalog.text)`

// barrierSQL is a transaction of its own, which the flush commits. Its COMMIT waits for what
// the session's synchronous_commit names: the disk, a standby's memory, its disk or its
// replay (local, remote_write, on, remote_apply). Where the session does not wait (off), it
// waits as with "on".
const barrierSQL = `select ` + writeSQL + `, case pg_catalog.current_setting('synchronous_commit')
	when 'off' then pg_catalog.set_config('synchronous_commit', 'on', true) end`

// committed reads the end of the last flush: COMMIT's tag, the position, if it was asked
// for, and the barrier's tag, if there is one. With a nil error the tag says what happened.
// An error with COMMIT's tag means that it is committed and seen by others, but not known
// to be in the log on disk: a crash may take it back. Without early release what comes after
// COMMIT's tag does not matter.
func committed(results pgx.BatchResults, early, asked bool) (tag pgconn.CommandTag, lsn replica.LSN, err error) {
	tag, err = results.Exec()
	if err != nil || tag.String() != "COMMIT" {
		return tag, 0, err
	}
	if asked {
		lsn, err = scanLSN(results.QueryRow())
	}
	if !early {
		return tag, lsn, nil
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
	return tag, lsn, err
}

// endReplay ends a transaction that found the record of its operation, and returns when
// that record is as durable as a commit is. Others may see it earlier: that of a
// command with EarlyRelease, and that of any command whose session was ended while it
// waited for a synchronous standby. The claim is given up first, so that
// repetitions wait together.
func endReplay(ctx context.Context, conn *pgxpool.Conn) error {
	_, err := conn.Exec(ctx, "rollback; "+barrierSQL, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return fmt.Errorf("metered: the operation's record is not known to be durable: %w", err)
	}
	return nil
}

// endReplayIn is endReplay in a transaction of the caller's. It makes the caller's COMMIT
// wait for the log, which that of a transaction that only reads would not do, and takes the
// transaction back to where it was, as undo does.
func endReplayIn(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, undoSQL+"; select "+writeSQL, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return failed("replay", err)
	}
	return nil
}

package sweep

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// MaxBacklogs is how often one call has backlogs written.
const MaxBacklogs = 64

const catchUpSQL = `select metered.catch_up($1::text, $2::int)`

// Through makes a call that has a transaction of its own. Where the call fails since more is due in a
// scope than one call writes, that is written first, in steps of a transaction each, which stay.
func Through(ctx context.Context, pool *pgxpool.Pool, name schema.Name, wait time.Duration,
	call func() error) error {
	for n := 0; ; n++ {
		err := call()
		scope := sqlstate.Behind(err)
		if scope == "" || n == MaxBacklogs {
			return err
		}
		if err := CatchUp(ctx, pool, name, wait, scope); err != nil {
			return err
		}
	}
}

// mostSteps is how many steps go out in one flush, at most. A call that is cancelled leaves no more
// of them to a server that does not hear of it.
const mostSteps = 8

// CatchUp writes what is due in such a scope, until a call writes the rest. Each step is a
// transaction that lets the scope's lock go, and stays. The flushes have 1, 2, 4 and then 8 steps,
// which wait for no round trip in between. A step that finds nothing more to write writes nothing.
func CatchUp(ctx context.Context, pool *pgxpool.Pool, name schema.Name, wait time.Duration,
	scope string) error {
	err := pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		for steps, more := 1, true; more; steps = min(2*steps, mostSteps) {
			var err error
			if more, err = takeSteps(ctx, conn.Conn(), name, wait, scope, steps); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fault.Failed("metered", "catch up", err)
	}
	return nil
}

// takeSteps sends so many steps in one flush. more: the last of them left something.
func takeSteps(ctx context.Context, conn *pgx.Conn, name schema.Name, wait time.Duration,
	scope string, steps int) (more bool, err error) {
	sql := name.SQL(catchUpSQL)
	flush := &pgx.Batch{}
	for range steps {
		flush.Queue("begin isolation level read committed")
		flush.Queue(sql, scope, int32(wait.Milliseconds()))
		flush.Queue("commit")
	}
	results := conn.SendBatch(ctx, flush)
	for range steps {
		_, err = results.Exec()
		if err == nil {
			err = results.QueryRow().Scan(&more)
		}
		if err == nil {
			_, err = results.Exec()
		}
		if err != nil {
			break
		}
	}
	if closing := results.Close(); err == nil {
		err = closing
	}
	if err != nil && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' { // the step that failed is still open
		if _, undone := conn.Exec(ctx, "rollback"); undone != nil {
			return false, errors.Join(err, undone)
		}
	}
	return more, err
}

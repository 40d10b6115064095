package sweep

import (
	"context"
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

// CatchUp writes what is due in such a scope, until a call writes the rest.
func CatchUp(ctx context.Context, pool *pgxpool.Pool, name schema.Name, wait time.Duration,
	scope string) error {
	sql := name.SQL(catchUpSQL)
	for more := true; more; {
		step := &pgx.Batch{} // in one round trip
		step.Queue("begin isolation level read committed")
		step.Queue(sql, scope, int32(wait.Milliseconds()))
		step.Queue("commit")
		results := pool.SendBatch(ctx, step)
		_, err := results.Exec()
		if err == nil {
			err = results.QueryRow().Scan(&more)
		}
		if closing := results.Close(); err == nil {
			err = closing
		}
		if err != nil {
			return fault.Failed("metered", "catch up", err)
		}
	}
	return nil
}

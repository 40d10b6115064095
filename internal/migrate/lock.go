package migrate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// locked runs f in a transaction that holds the migration lock. A lock of the session would stay
// behind on a pooler's server connection. READ COMMITTED lets f see the migration that it waited
// for. If f meets a locked table, all is rolled back and tried again, so that others who want the
// table do not queue behind f.
func (m migration) locked(ctx context.Context, f func(pgx.Tx) error) error {
	what := ""
	for n := 1; ; n++ {
		entered := false
		err := pgx.BeginTxFunc(ctx, m.conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "set local lock_timeout = '1s'"); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, "select pg_catalog.pg_advisory_xact_lock($1)", schema.MigrationLock); err != nil {
				return err
			}
			entered = true
			return f(tx)
		})
		if state := sqlstate.Of(err); state == sqlstate.LockNotAvailable || state == sqlstate.DeadlockDetected {
			what = m.holders(ctx)
			if m.opts.OnWait != nil {
				m.opts.OnWait(ctx, what)
			}
			if !entered || rest(ctx, n) == nil {
				continue
			}
		}
		if what != "" && ctx.Err() != nil {
			return fmt.Errorf("%w: waiting for %s: %w", fault.ErrBusy, what, errors.Join(pause.Ended(ctx), err))
		}
		return err
	}
}

// rest lets others through before attempt n+1, for up to 3 s.
func rest(ctx context.Context, n int) error {
	limit := min(1500*time.Millisecond, 100*time.Millisecond<<min(n, 10))
	select {
	case <-time.After(limit + rand.N(limit)):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

const holdersSQL = `
select pg_catalog.format('%s, which process %s holds%s%s',
    pg_catalog.string_agg(distinct coalesce(l.relation::regclass::text, 'another migration'), ', '), l.pid,
    ' (' || nullif(a.application_name, '') || ')',
    ', in a transaction since ' || pg_catalog.to_char(a.xact_start at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"'))
from pg_locks l left join pg_stat_activity a on a.pid = l.pid
where l.granted and l.pid <> pg_catalog.pg_backend_pid() and l.database = (select oid from pg_database where datname = pg_catalog.current_database())
  and (l.locktype = 'advisory' and l.objsubid = 1 and (l.classid::bigint << 32 | l.objid::bigint) = $1
    or l.relation in (select c.oid from pg_class c join pg_namespace s on s.oid = c.relnamespace
                      where c.relkind in ('r', 'i') and s.nspname in ($2, coalesce(nullif($3, ''), current_schema()))))
group by l.pid, a.application_name, a.xact_start
order by a.xact_start limit 3`

// holders describes the oldest transactions with locks that a migration waits for.
func (m migration) holders(ctx context.Context) string {
	rows, _ := answer.Query(ctx, m.conn, holdersSQL, schema.MigrationLock, m.opts.Schema.String(), m.opts.RiverSchema)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(all) == 0 {
		return "a lock"
	}
	return strings.Join(all, "; ")
}

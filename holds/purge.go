package holds

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/purge"
)

// PurgeOptions says which holds Purge deletes. The zero value has the documented defaults.
type PurgeOptions struct {
	// OlderThan is the time since a hold's end from which on it is deleted, from 1s to a century.
	// Defaults to 30 days.
	OlderThan time.Duration

	// Batch is the most holds that one transaction deletes, from 1 to 10,000. Defaults to 1,000.
	Batch int

	// Progress is called after each batch, with the number of holds deleted so far. It may be nil.
	Progress func(deleted int64)

	// DryRun counts the holds and deletes none. It needs SELECT on the table of holds.
	DryRun bool
}

const purgeableSQL = `
select count(*) from metered.holds h, (select metered.clock() - $1::interval as at) cutoff
where h.ended_at is not null and (h.claim is null or h.state <> 'c' or h.returned)
  and h.ended_at < cutoff.at and not h.pending and coalesce(h.issued_at, h.ended_at) < cutoff.at`

const purgeSQL = `select deleted, last from metered.purge_holds($1, metered.clock() - $2::interval, $3, $4)`

// Purge deletes holds that ended longer ago than OlderThan, in batches, with their history. It
// keeps confirmed claims, unannounced holds, and holds whose id has a later time. Afterwards an id
// with a time (UUIDv7) at or before the latest purged one is ErrRetired. Any other id looks new.
//
// It waits, up to LockTimeout (budget.ErrBusy), for other purges and for REPEATABLE READ
// transactions that placed an id with a time. It needs metered.GrantMaintenanceSQL.
func (b *Book) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (int64, error) {
	if err := cmp.Or(b.made(), notNil("pool", pool)); err != nil {
		return 0, err
	}
	if opts.OlderThan == 0 {
		opts.OlderThan = defaultOlderThan
	}
	o := purge.Options(opts)
	if err := o.Check(errArgument); err != nil {
		return 0, err
	}
	deleted, err := o.Run(ctx, b.observer, "holds", pool, b.sql.purgeable, b.sql.purge, b.waitMS())
	return deleted, failed("purge", err)
}

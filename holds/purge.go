package holds

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/purge"
)

// DefaultOlderThan is how long Purge keeps holds that have ended.
const DefaultOlderThan = 30 * 24 * time.Hour

// PurgeOptions says what Purge deletes, and how. The zero value deletes what ended more
// than 30 days ago, 1,000 holds at a time.
type PurgeOptions struct {
	// OlderThan is how long a hold is kept after it has ended, 1s to a century.
	// Defaults to DefaultOlderThan.
	OlderThan time.Duration
	// Batch is how many holds one transaction deletes, 1 to 10,000. Defaults to 1,000.
	Batch int
	// Progress is called after each batch that deleted anything, once it is
	// committed, with the number deleted so far. Defaults to none.
	Progress func(deleted int64)
}

const purgeSQL = `select deleted, last from metered.purge_holds($1, metered.clock() - $2::interval, $3, $4)`

// Purge deletes holds that ended longer ago than OlderThan, with their lines and
// history, oldest first, and returns how many. What they spent stays spent: the ledger
// is not touched. Three kinds are kept longer: confirmed claims, until Refund gives them
// back; holds that ended by time, until Sweep or Expire announces them; and holds whose id
// carries a time, until that time, too, is older than OlderThan.
//
// From then on an id that carries its time (UUIDv7, the default of Request.ID) is
// ErrRetired, and cannot be placed again, if that time is at or before the latest one among
// the ids that were purged; any other id looks new.
//
// It owns its transactions, one for each batch: an error, or the end of ctx, leaves
// what was deleted until then, which is the number returned with it. It waits for
// transactions at REPEATABLE READ or SERIALIZABLE that placed an id with a time, and for
// other purges, each time no longer than the ledger's LockTimeout (ErrBusy). It needs the
// schema's owner or a role with GrantMaintenanceSQL's grants.
func (b *Book) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (int64, error) {
	if err := cmp.Or(b.made(), notNil("pool", pool)); err != nil {
		return 0, err
	}
	if opts.OlderThan == 0 {
		opts.OlderThan = DefaultOlderThan
	}
	o := purge.Options(opts)
	if err := o.Check(errArgument); err != nil {
		return 0, err
	}
	deleted, err := o.Run(ctx, pool, b.sql.purge, b.waitMS())
	return deleted, failed("purge", err)
}

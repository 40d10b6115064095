package holds

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Bounds of Purge.
const (
	DefaultOlderThan  = 30 * 24 * time.Hour
	MinOlderThan      = time.Second
	DefaultPurgeBatch = 1000
	MaxPurgeBatch     = 10_000
)

// PurgeOptions says what Purge deletes, and how. The zero value deletes what ended more
// than 30 days ago, 1000 holds at a time.
type PurgeOptions struct {
	// OlderThan is how long a hold is kept after it has ended, from MinOlderThan to
	// MaxMaxLifetime. Defaults to DefaultOlderThan.
	OlderThan time.Duration
	// Batch is how many holds one transaction deletes, 1 to MaxPurgeBatch. Defaults to
	// DefaultPurgeBatch.
	Batch int
	// Progress is called after each batch, once it is committed, with the number
	// deleted so far. Defaults to none.
	Progress func(deleted int64)
}

const purgeSQL = `select deleted, last from metered.purge_holds($1::timestamptz, $2::timestamptz, $3::int, $4::int)`

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
	if opts.OlderThan == 0 {
		opts.OlderThan = DefaultOlderThan
	}
	if opts.Batch == 0 {
		opts.Batch = DefaultPurgeBatch
	}
	switch {
	case opts.OlderThan < MinOlderThan || opts.OlderThan > MaxMaxLifetime:
		return 0, invalid("PurgeOptions.OlderThan", "%v is not from %v to %v", opts.OlderThan, MinOlderThan, MaxMaxLifetime)
	case opts.Batch < 1 || opts.Batch > MaxPurgeBatch:
		return 0, invalid("PurgeOptions.Batch", "%d is not from 1 to %d", opts.Batch, MaxPurgeBatch)
	case pool == nil:
		return 0, invalid("pool", "is nil")
	}
	var cutoff time.Time
	err := pool.QueryRow(ctx, b.schema.SQL(`select metered.clock() - $1::interval`), interval(opts.OlderThan)).Scan(&cutoff)
	if err != nil {
		return 0, failed("purge", err)
	}
	var total int64
	after := any("-infinity")
	for {
		var deleted int
		var last *time.Time
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, b.sql.purge, after, cutoff, opts.Batch, b.waitMS()).Scan(&deleted, &last)
		})
		if err != nil {
			return total, failed("purge", err)
		}
		total += int64(deleted)
		if deleted > 0 && opts.Progress != nil {
			opts.Progress(total)
		}
		if deleted < opts.Batch {
			return total, nil
		}
		after = *last
	}
}

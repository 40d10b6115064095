package jobs

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/purge"
)

// PurgeOptions says which keys to delete.
type PurgeOptions struct {
	// OlderThan is the age of a key from which on it is deleted, from 1s to a century. It must be
	// longer than callers retry or schedule ahead. Required.
	OlderThan time.Duration

	// Batch is the most keys that one transaction deletes, from 1 to 10,000. Defaults to 1,000.
	Batch int

	// Progress is called after each batch, with the number of keys deleted so far. It may be nil.
	Progress func(deleted int64)

	// DryRun counts the keys and deletes none. It needs SELECT on the table of keys.
	DryRun bool
}

const purgeableSQL = `
select count(*) from metered.job_keys k, (select metered.clock() - $1::interval as at) cutoff
where k.created_at < cutoff.at`

// Purge deletes keys older than OlderThan, in batches. A deleted key looks new. It needs
// metered.GrantMaintenanceSQL.
func (e *Enqueuer) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (int64, error) {
	if err := cmp.Or(e.made(), notNil("pool", pool)); err != nil {
		return 0, err
	}
	o := purge.Options(opts)
	if err := o.Check(errArgument); err != nil {
		return 0, err
	}
	deleted, err := o.Run(ctx, e.observer, "job_keys", pool, e.purgeableSQL, e.purgeSQL)
	if err != nil {
		return deleted, fault.Failed("jobs", "purge keys", err)
	}
	return deleted, nil
}

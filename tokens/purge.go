package tokens

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/purge"
)

// Zero works.
type PurgeOptions struct {
	// since the last use, revocation or expiry, 1s to a century. A purged secret can be minted again. Defaults to 30 days
	OlderThan time.Duration
	Batch     int                 // tokens per transaction, 1 to 10,000. Defaults to 1,000
	Progress  func(deleted int64) // after each batch
	DryRun    bool                // only counts. Needs SELECT on the table
}

const purgeableSQL = `
select count(*) from metered.tokens t, (select metered.clock() - $1::interval as at) cutoff
where coalesce(t.ended_at, t.expires_at) <= cutoff.at`

const purgeSQL = `select deleted, last from metered.purge_tokens($1, metered.clock() - $2::interval, $3)`

// Purge deletes tokens that ended longer ago than OlderThan, in batches. It needs metered.GrantMaintenanceSQL.
func (s *Store) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (int64, error) {
	if err := cmp.Or(s.made(), notNil("pool", pool)); err != nil {
		return 0, err
	}
	if opts.OlderThan == 0 {
		opts.OlderThan = defaultOlderThan
	}
	o := purge.Options(opts)
	if err := o.Check(errArgument); err != nil {
		return 0, err
	}
	deleted, err := o.Run(ctx, s.observer, "tokens", pool, s.sql.purgeable, s.sql.purge)
	if err != nil {
		return deleted, fault.Failed("tokens", "purge", err)
	}
	return deleted, nil
}

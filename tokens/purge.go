package tokens

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/purge"
)

// PurgeOptions says which tokens Purge deletes. The zero value has the documented defaults.
type PurgeOptions struct {
	// OlderThan is how long ago a token ended, by its last use, its revocation or its expiry,
	// before it is deleted: 1s to a century. Once it is deleted, its secret can be minted again.
	// Defaults to 30 days.
	OlderThan time.Duration

	// Batch is the most tokens that one transaction deletes, from 1 to 10,000. Defaults to 1,000.
	Batch int

	// Progress is called after each batch, with the number of tokens deleted so far. It may be
	// nil.
	Progress func(deleted int64)

	// DryRun counts the tokens and deletes none. It needs SELECT on the table of tokens.
	DryRun bool
}

const purgeableSQL = `
select count(*) from metered.tokens t, (select metered.clock() - $1::interval as at) cutoff
where coalesce(t.ended_at, t.expires_at) <= cutoff.at`

const purgeSQL = `select deleted, last from metered.purge_tokens($1, metered.clock() - $2::interval, $3)`

// Purge deletes tokens that ended longer ago than OlderThan, in batches. It needs
// metered.GrantMaintenanceSQL.
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

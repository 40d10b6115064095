package tokens

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/purge"
)

// DefaultOlderThan is how long Purge keeps tokens that have ended.
const DefaultOlderThan = 30 * 24 * time.Hour

// PurgeOptions says what Purge deletes, and how. The zero value deletes what ended more than 30 days ago.
type PurgeOptions struct {
	// OlderThan is how long a token is kept after its last use, revocation or expiry, 1s to a century; until then its
	// secret cannot be minted again. Defaults to DefaultOlderThan.
	OlderThan time.Duration

	// Batch is how many tokens one transaction deletes, 1 to 10,000. Defaults to 1,000.
	Batch int

	// Progress is called after each batch with the number deleted so far. Defaults to none.
	Progress func(deleted int64)
}

const purgeSQL = `select deleted, last from metered.purge_tokens($1, metered.clock() - $2::interval, $3)`

// Purge deletes tokens that ended longer ago than OlderThan, oldest first, and returns how many. It owns its
// transactions, one for each batch: what was deleted stays deleted if it fails or ctx ends. Any number may run at
// once. It needs the schema's owner or a role with metered.GrantMaintenanceSQL's grants.
func (s *Store) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (int64, error) {
	if err := cmp.Or(s.made(), notNil("pool", pool)); err != nil {
		return 0, err
	}
	if opts.OlderThan == 0 {
		opts.OlderThan = DefaultOlderThan
	}
	o := purge.Options(opts)
	if err := o.Check(errArgument); err != nil {
		return 0, err
	}
	deleted, err := o.Run(ctx, pool, s.sql.purge)
	if err != nil {
		return deleted, fault.Failed("tokens", "purge", err)
	}
	return deleted, nil
}

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

// PurgeOptions says what Purge deletes, and how. The zero value deletes what
// ended more than 30 days ago, 1,000 tokens at a time.
type PurgeOptions struct {
	// OlderThan is how long a token is kept after it ended: after its last use,
	// its revocation or its expiry. Until then a used token is known to be used,
	// and a derived secret cannot be minted again. 1s to a century. Defaults to
	// DefaultOlderThan.
	OlderThan time.Duration

	// Batch is how many tokens one transaction deletes, 1 to 10,000.
	// Defaults to 1,000.
	Batch int

	// Progress is called after each batch that deleted anything, once it is
	// committed, with the number deleted so far. Defaults to none.
	Progress func(deleted int64)
}

const purgeSQL = `select deleted, last from metered.purge_tokens($1, metered.clock() - $2::interval, $3)`

// Purge deletes tokens that ended longer than the retention ago, oldest first,
// and returns how many. Live tokens are never touched.
//
// It owns its transactions, one for each batch: an error, or the end of ctx,
// leaves what was deleted until then, which is the number returned with the
// error. Any number may run at the same time: they pass over each other's rows,
// and nobody waits for them. It needs the schema's owner or a role with
// metered.GrantMaintenanceSQL's grants.
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

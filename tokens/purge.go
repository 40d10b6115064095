package tokens

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Bounds of a Purge.
const (
	MinOlderThan     = time.Second
	MaxOlderThan     = 10 * 366 * 24 * time.Hour
	DefaultOlderThan = 30 * 24 * time.Hour

	MaxPurgeBatch     = 10_000
	DefaultPurgeBatch = 1000
)

// PurgeOptions says what Purge deletes, and how. The zero value deletes what
// ended more than 30 days ago, 1000 tokens at a time.
type PurgeOptions struct {
	// OlderThan is how long a token is kept after it ended: after its last use,
	// its revocation or its expiry. Until then a used token is known to be used,
	// and a derived secret cannot be minted again. 1 s to 10 years. Defaults to
	// 30 days.
	OlderThan time.Duration

	// Batch is how many tokens one transaction deletes, 1 to 10,000.
	// Defaults to 1000.
	Batch int

	// Progress is called after each batch that deleted anything, once it is
	// committed, with the number deleted so far. Defaults to none.
	Progress func(deleted int64)
}

const purgeSQL = `select deleted, last_end from metered.purge_tokens($1, $2, $3)`

// Purge deletes tokens that ended longer than the retention ago, oldest first,
// and returns how many. Live tokens are never touched.
//
// It owns its transactions, one for each batch: an error, or the end of ctx,
// leaves what was deleted until then, which is the number returned with the
// error. Any number may run at the same time: they pass over each other's rows,
// and nobody waits for them. It needs the schema's owner or a role with
// metered.GrantMaintenanceSQL's grants.
func (s *Store) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (int64, error) {
	if opts.OlderThan == 0 {
		opts.OlderThan = DefaultOlderThan
	}
	if opts.OlderThan < MinOlderThan || opts.OlderThan > MaxOlderThan {
		return 0, invalid("PurgeOptions.OlderThan", "%v: want %v to %v", opts.OlderThan, MinOlderThan, MaxOlderThan)
	}
	if opts.Batch == 0 {
		opts.Batch = DefaultPurgeBatch
	}
	if opts.Batch < 1 || opts.Batch > MaxPurgeBatch {
		return 0, invalid("PurgeOptions.Batch", "%d: want 1 to %d", opts.Batch, MaxPurgeBatch)
	}
	if pool == nil {
		return 0, invalid("pool", "is nil")
	}
	var total int64
	var after *time.Time
	for {
		deleted, lastEnd, err := s.purgeBatch(ctx, pool, after, opts)
		if err != nil {
			return total, dbError("purge", err)
		}
		total += int64(deleted)
		if deleted > 0 && opts.Progress != nil {
			opts.Progress(total)
		}
		if deleted < opts.Batch {
			return total, nil
		}
		after = lastEnd
	}
}

// purgeBatch runs at READ COMMITTED whatever the session's default: at higher
// levels two purges would fail each other instead of passing over rows.
func (s *Store) purgeBatch(ctx context.Context, pool *pgxpool.Pool, after *time.Time, opts PurgeOptions) (deleted int, lastEnd *time.Time, err error) {
	txOptions := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	err = pgx.BeginTxFunc(ctx, pool, txOptions, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, s.sql.purge, after, opts.OlderThan.Microseconds(), opts.Batch).
			Scan(&deleted, &lastEnd)
	})
	return deleted, lastEnd, err
}

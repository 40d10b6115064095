package jobs

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Bounds and defaults of Purge.
const (
	DefaultPurgeBatch = 1_000
	MaxPurgeBatch     = 100_000
	MinOlderThan      = time.Second
)

// PurgeOptions says which keys to forget.
type PurgeOptions struct {
	// OlderThan is the age above which a key is forgotten, by the database's clock,
	// at least a second. It must be longer than any caller may still retry with the
	// key, and than any job is scheduled ahead. Required.
	OlderThan time.Duration

	// Batch is the number of keys per transaction, 1 to 100,000. Defaults to 1,000.
	Batch int

	// Progress is called after each transaction, in the goroutine of the call.
	// Defaults to none.
	Progress func(PurgeReport)
}

// PurgeReport says what a purge did so far.
type PurgeReport struct {
	Keys int64 // keys forgotten
}

const cutoffSQL = `select metered.clock() - $1::interval`

const purgeSQL = `select purged, last_at from metered.purge_job_keys($1, $2, $3)`

// Purge forgets the keys that are older than opts.OlderThan. A forgotten key looks
// new: the next Enqueue of it makes another job. Jobs are left alone; deleting those
// is River's.
//
// It owns its transactions, one per batch, so what is done stays done when ctx ends
// or an error stops it, and the report says how far it came. Any number may run at
// once: they pass over each other's keys, and wait for nobody. An Enqueue of a key
// that is just being forgotten waits for the batch, and makes a new job.
//
// Run it from a maintenance program, as the owner of the schema or a role with the
// maintenance grants: an application has no right to it. Its errors are ErrArgument
// and those of Postgres.
func (e *Enqueuer) Purge(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (PurgeReport, error) {
	var report PurgeReport
	batch := cmp.Or(opts.Batch, DefaultPurgeBatch)
	switch {
	case pool == nil:
		return report, invalid("pool", "want a pool, got nil")
	case opts.OlderThan < MinOlderThan:
		return report, invalid("PurgeOptions.OlderThan", "%s: want at least %s", opts.OlderThan, MinOlderThan)
	case batch < 1 || batch > MaxPurgeBatch:
		return report, invalid("PurgeOptions.Batch", "%d: want 1 to %d", batch, MaxPurgeBatch)
	}
	var cutoff time.Time
	if err := pool.QueryRow(ctx, e.cutoffSQL, opts.OlderThan).Scan(&cutoff); err != nil {
		return report, wrap("purge keys", err)
	}
	since := pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	for {
		var n int64
		// Read committed, whatever the role's default: above it, passing over a row
		// that another purge has just deleted would be 40001.
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, e.purgeSQL, since, cutoff, batch).Scan(&n, &since)
		})
		if err != nil {
			return report, wrap("purge keys", err)
		}
		report.Keys += n
		if opts.Progress != nil {
			opts.Progress(report)
		}
		if n < int64(batch) {
			return report, nil
		}
	}
}

// Package purge deletes old rows, batch after batch.
package purge

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/observe"
)

// Bounds of Options, and the default of Batch.
const (
	MinOlderThan = time.Second
	MaxOlderThan = 36525 * 24 * time.Hour // a century, as bounds.MaxWindow
	DefaultBatch = 1000
	MaxBatch     = 10_000
)

// Options is the common form of the PurgeOptions of all packages.
type Options struct {
	OlderThan time.Duration
	Batch     int
	Progress  func(deleted int64)
	DryRun    bool
}

// Check refuses options out of bounds with an error of that kind, and sets the default of Batch.
func (o *Options) Check(kind *fault.Sentinel) error {
	if o.Batch == 0 {
		o.Batch = DefaultBatch
	}
	switch {
	case o.OlderThan < MinOlderThan || o.OlderThan > MaxOlderThan:
		return fault.Invalid(kind, "PurgeOptions.OlderThan", "%v is not from %v to %v", o.OlderThan, MinOlderThan, MaxOlderThan)
	case o.Batch < 1 || o.Batch > MaxBatch:
		return fault.Invalid(kind, "PurgeOptions.Batch", "%d is not from 1 to %d", o.Batch, MaxBatch)
	}
	return nil
}

// count is how many rows Run would delete.
func (o *Options) count(ctx context.Context, pool *pgxpool.Pool, count string) (n int64, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		return answer.QueryRow(ctx, tx, count, o.age()).Scan(&n)
	})
	return n, err
}

func (o *Options) age() pgtype.Interval {
	return pgtype.Interval{Microseconds: o.OlderThan.Microseconds(), Valid: true}
}

// Run calls sql, each time in a transaction of its own, until it deletes less than a batch. It
// returns how many rows were deleted, with an error too, as deleted rows stay deleted. sql takes
// the time from which to go on (null: from the beginning), the age, how many rows at most, and
// args. It returns how many it deleted and where to go on. With DryRun, Run returns the answer of
// the query count, which takes the age, and deletes nothing.
//
// It runs at READ COMMITTED, not at the session's default: above it, two purges would fail each
// other instead of passing over rows.
//
// The observer gets each batch under a name, but no DryRun.
func (o *Options) Run(ctx context.Context, to *observed.To, name string, pool *pgxpool.Pool, count, sql string, args ...any) (total int64, err error) {
	if o.DryRun {
		return o.count(ctx, pool, count)
	}
	ctx, span := to.Start(ctx, observe.Op{Work: observe.Purge, Name: name})
	defer func() { span.With(observe.End{Err: err, Rows: total}) }()
	var from *time.Time
	for {
		var deleted int64
		err := commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return answer.QueryRow(ctx, tx, sql, append([]any{from, o.age(), o.Batch}, args...)...).Scan(&deleted, &from)
		})
		if err != nil {
			return total, err
		}
		total += deleted
		to.Purged(ctx, name, deleted)
		if deleted > 0 && o.Progress != nil {
			o.Progress(total)
		}
		if deleted < int64(o.Batch) {
			return total, nil
		}
	}
}

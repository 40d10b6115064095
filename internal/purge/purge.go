// Package purge deletes old rows, batch after batch, for package maintain.
package purge

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/observe"
)

// Bounds of Options.OlderThan, and the defaults of Options.
const (
	MinOlderThan       = time.Second
	MaxOlderThan       = 36525 * 24 * time.Hour // a century, as bounds.MaxWindow
	DefaultOlderThan   = 30 * 24 * time.Hour
	defaultBatch       = 1000
	defaultLockTimeout = 5 * time.Second
)

// Options says which rows of a Table are deleted, and how. The zero value has the documented
// defaults.
type Options struct {
	// OlderThan is the age from which on rows are deleted. Defaults to DefaultOlderThan.
	OlderThan time.Duration

	// Batch is the most rows that one transaction deletes. Defaults to 1,000.
	Batch int

	// Progress is called after each batch, with the number of rows deleted so far. It may be nil.
	Progress func(deleted int64)

	// DryRun counts the rows and deletes none.
	DryRun bool

	// Schema is the schema of the table. Defaults to schema.Default.
	Schema schema.Name

	// Observer gets each batch, but no DryRun. It may be nil.
	Observer *observed.To

	// LockTimeout is how long a batch waits for locks. Defaults to 5 seconds.
	LockTimeout time.Duration
}

// Delete deletes old rows of t, in batches of a transaction each, until one is not full. It returns
// how many rows were deleted, with an error too, as deleted rows stay deleted.
//
// It runs at READ COMMITTED, not at the session's default: above it, two purges would fail each
// other instead of passing over rows.
func (t *Table) Delete(ctx context.Context, pool *pgxpool.Pool, o Options) (int64, error) {
	o.Batch = cmp.Or(o.Batch, defaultBatch)
	if o.Schema == (schema.Name{}) {
		o.Schema, _ = schema.Parse("")
	}
	deleted, err := t.delete(ctx, pool, o)
	return deleted, fault.Failed("maintain", "purge "+t.name, err)
}

func (t *Table) delete(ctx context.Context, pool *pgxpool.Pool, o Options) (total int64, err error) {
	age := pgtype.Interval{Microseconds: cmp.Or(o.OlderThan, DefaultOlderThan).Microseconds(), Valid: true}
	if o.DryRun {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			return answer.QueryRow(ctx, tx, o.Schema.SQL(t.count), age).Scan(&total)
		})
		return total, err
	}
	var from *time.Time // where the next batch goes on
	sql, args := o.Schema.SQL(t.purge), []any{from, age, o.Batch}
	if t.waits {
		args = append(args, cmp.Or(o.LockTimeout, defaultLockTimeout).Milliseconds())
	}
	ctx, span := o.Observer.Start(ctx, observe.Op{Work: observe.Purge, Name: t.name})
	defer func() { span.With(observe.End{Err: err, Rows: total}) }()
	for {
		var deleted int64
		args[0] = from
		err := commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return answer.QueryRow(ctx, tx, sql, args...).Scan(&deleted, &from)
		})
		if err != nil {
			return total, err
		}
		total += deleted
		o.Observer.Purged(ctx, t.name, deleted)
		if deleted > 0 && o.Progress != nil {
			o.Progress(total)
		}
		if deleted < int64(o.Batch) {
			return total, nil
		}
	}
}

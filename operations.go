package metered

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// Operation is the record of a command that committed.
type Operation struct {
	Namespace, ID string
	Result        json.RawMessage
	Receipt       budget.Receipt // without standings
	Holds         []holds.Hold   // as they were when it was completed
	At            time.Time      // when it was completed, by the database's clock
	IssuedAt      time.Time      // zero if the id carried no time
}

const lookupSQL = `
select result, scopes, amounts, seqs, ats, holds, at, issued_at
from metered.operations
where namespace = $1 and id = $2`

// Lookup returns the record of an operation, or ErrUnknownOperation: the operation has not
// committed (yet), or its record was purged. It waits for nobody: the record of a command
// with EarlyRelease may not be durable yet, where Do with the same command would wait until
// it is. db is a pool, a connection or a transaction. Other errors: *ArgumentError.
func (c *Client) Lookup(ctx context.Context, db budget.Querier, namespace, id string) (Operation, error) {
	if db == nil {
		return Operation{}, invalid("db", "is nil")
	}
	if err := checkID(namespace, id); err != nil {
		return Operation{}, err
	}
	var b begun
	var issued *time.Time
	err := db.QueryRow(ctx, c.sql.lookup, namespace, id).
		Scan(&b.result, &b.scopes, &b.amounts, &b.seqs, &b.ats, &b.holds, &b.at, &issued)
	if errors.Is(err, pgx.ErrNoRows) {
		return Operation{}, fmt.Errorf("%w: %q in namespace %q", ErrUnknownOperation, id, namespace)
	}
	if err != nil {
		return Operation{}, failed("look up", err)
	}
	rec, err := b.record()
	if err != nil {
		return Operation{}, err
	}
	op := Operation{Namespace: namespace, ID: id, Result: rec.raw, Receipt: rec.receipt, Holds: rec.holds, At: rec.at}
	if issued != nil {
		op.IssuedAt = *issued
	}
	return op, nil
}

// PurgeOptions says which records of operations to purge.
type PurgeOptions struct {
	// OlderThan is how long an operation is remembered at least, from 1s to
	// budget.MaxWindow, a century. It is how long a client may wait before it repeats a
	// call, and should be much longer than the clients' clocks may be wrong by. Required.
	OlderThan time.Duration
	// Batch is how many records one transaction deletes at most, from 1 to 100,000.
	// Defaults to 5,000.
	Batch int
	// Progress is called after each transaction with the records deleted so far.
	Progress func(deleted int64)
}

const purgeSQL = `select deleted, last from metered.purge_operations($1::timestamptz, metered.clock() - $2::interval, $3::int)`

// PurgeOperations deletes records of operations that were issued and completed longer ago
// than OlderThan, in small transactions of its own, and moves the horizon to the latest
// time that their ids carry: an id of that time or an older one is ErrRetired from then on.
// An id that carries no time looks new again once its record is gone, and its command would
// run again.
//
// It needs the schema's owner or a role with GrantMaintenanceSQL's grants. Any
// number may run at once: they pass over each other's rows, and take turns at moving
// the horizon, for at most Config.LockTimeout (ErrBusy). It returns the number of
// records deleted, also with an error: what is deleted stays deleted.
func (c *Client) PurgeOperations(ctx context.Context, pool *pgxpool.Pool, opts PurgeOptions) (int64, error) {
	if pool == nil {
		return 0, invalid("pool", "is nil")
	}
	if opts.OlderThan < time.Second || opts.OlderThan > budget.MaxWindow {
		return 0, invalid("PurgeOptions.OlderThan", "%v is not from 1s to %v", opts.OlderThan, budget.MaxWindow)
	}
	if opts.Batch == 0 {
		opts.Batch = 5000
	}
	if opts.Batch < 1 || opts.Batch > 100_000 {
		return 0, invalid("PurgeOptions.Batch", "%d is not from 1 to 100,000", opts.Batch)
	}
	var after *time.Time
	for total := int64(0); ; {
		deleted, last, err := c.purgeBatch(ctx, pool, after, opts)
		if err != nil {
			return total, failed("purge operations", err)
		}
		after = last
		total += deleted
		if opts.Progress != nil {
			opts.Progress(total)
		}
		if deleted < int64(opts.Batch) {
			return total, nil
		}
	}
}

// purgeBatch runs at READ COMMITTED, whatever the default: above it, two purges
// would fail over the horizon.
func (c *Client) purgeBatch(ctx context.Context, pool *pgxpool.Pool, after *time.Time, opts PurgeOptions) (deleted int64, last *time.Time, err error) {
	wait := strconv.FormatInt(c.cfg.LockTimeout.Milliseconds(), 10)
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select set_config('lock_timeout', $1, true)`, wait); err != nil {
			return err
		}
		return tx.QueryRow(ctx, c.sql.purge, after, interval(opts.OlderThan), opts.Batch).Scan(&deleted, &last)
	})
	return deleted, last, err
}

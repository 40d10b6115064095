package jobs

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/internal/fault"
)

// Enqueue inserts a job in the caller's transaction: workers see it when tx
// commits, and not before. With Options.Key it inserts it once per (queue, key),
// where the queue is the one that River would choose.
//
// Rollback: the job and its key are gone, nobody was notified, and the key is free
// for whoever waits for it. Rolling back to a savepoint set before the call does
// the same.
//
// Idempotency: a key used before returns the first job's id and Created false. That
// holds when the job has run, failed, was cancelled or deleted, until the key is
// purged. The args are compared as they are encoded in JSON, before hooks change
// them, so a field added to the args' type makes old keys conflict unless it is
// omitted when empty.
//
// Locks: the key's row, until tx ends. An Enqueue of the same key elsewhere waits
// for that, at most Config.LockTimeout: if tx rolls back it makes the job itself, if
// tx commits it returns tx's job at READ COMMITTED, and fails with 40001 at
// REPEATABLE READ and SERIALIZABLE, where a retry returns it. Two transactions that
// enqueue the same two keys in different order can deadlock (40P01, retry);
// EnqueueMany sorts them.
//
// Errors: ErrArgument before any SQL (also for what jsonb cannot hold: text that is not
// UTF-8, U+0000, half of a surrogate pair, a number beyond numeric), and ErrConflict, leave
// tx usable and wrote nothing. After any other error tx is aborted as after a failed
// statement, so that no key can be committed without its job: ErrBusy, ErrPlugin, what
// River's insert or your hooks returned, and Postgres errors, 40001 and 40P01 among them,
// which are found by errors.As.
//
// One round trip without a key, two with a new one, one with a known one; and one
// more whenever River's NOTIFY for the queue is due. Most programs want this call,
// with a key.
func (e *Enqueuer) Enqueue(ctx context.Context, tx pgx.Tx, args river.JobArgs, opts *Options) (Result, error) {
	if err := cmp.Or(e.made(), notNil("tx", tx)); err != nil {
		return Result{}, err
	}
	p, err := prepare("", args, opts)
	if err != nil {
		return Result{}, err
	}
	results, err := e.enqueue(ctx, tx, []*prepared{p})
	if err != nil {
		return Result{}, err
	}
	return results[0], nil
}

// EnqueueMany is Enqueue for 1 to 10,000 jobs, with and without keys, in as many
// round trips as one job takes. The results are in the order of items. A key that is
// there twice makes one job, and the second item gets its id with Created false.
//
// Rollback, idempotency and locks are as with Enqueue; keys are claimed in the order
// of queue and key, and Config.LockTimeout bounds the waits of all of them together.
// ErrArgument leaves tx usable. After any other error, ErrConflict among them, tx is
// aborted unless no key was new.
func (e *Enqueuer) EnqueueMany(ctx context.Context, tx pgx.Tx, items []Item) ([]Result, error) {
	if err := cmp.Or(e.made(), notNil("tx", tx)); err != nil {
		return nil, err
	}
	if len(items) < 1 || len(items) > MaxItems {
		return nil, invalid("Items", "%d of them: want 1 to %d", len(items), MaxItems)
	}
	all := make([]*prepared, len(items))
	for i, item := range items {
		p, err := prepare(fmt.Sprintf("Items[%d].", i), item.Args, item.Options)
		if err != nil {
			return nil, err
		}
		all[i] = p
	}
	return e.enqueue(ctx, tx, all)
}

func (e *Enqueuer) enqueue(ctx context.Context, tx pgx.Tx, all []*prepared) (results []Result, err error) {
	var keyed []*prepared
	for _, p := range all {
		if p.key != "" {
			keyed = append(keyed, p)
		}
	}
	if len(keyed) == 0 {
		return e.insert(ctx, tx, all)
	}

	claims, err := e.claimKeys(ctx, tx, keyed)
	if err != nil {
		return nil, fault.Failed("jobs", "claim key", err)
	}
	ids := claimed{}
	for i, p := range keyed {
		if claims[i].created {
			ids[p.ident()] = claims[i].id
		}
	}
	if len(ids) > 0 {
		// From here to the insert the transaction holds keys without jobs. That must
		// not be committed, also not if a hook panics.
		defer func() {
			if err != nil || results == nil {
				abort(ctx, tx)
			}
		}()
		ctx = context.WithValue(ctx, claimedKey{}, ids)
	}
	return e.insertNew(ctx, tx, all, claims)
}

// insertNew inserts the jobs whose keys are new or that have none. claims are those
// of the keyed jobs in all, in their order.
func (e *Enqueuer) insertNew(ctx context.Context, tx pgx.Tx, all []*prepared, claims []claim) ([]Result, error) {
	results := make([]Result, len(all))
	var fresh []*prepared
	var places []int // of fresh in all
	for i, p := range all {
		if p.key != "" {
			c := claims[0]
			claims = claims[1:]
			if what := p.differs(c); what != "" {
				return nil, &ConflictError{Queue: p.opts.Queue, Key: p.key, JobID: c.id, Differs: what}
			}
			results[i] = Result{JobID: c.id, Created: c.created}
			if !c.created {
				continue
			}
		}
		fresh, places = append(fresh, p), append(places, i)
	}
	if len(fresh) == 0 {
		return results, nil
	}
	inserted, err := e.insert(ctx, tx, fresh)
	if err != nil {
		return nil, err
	}
	for i, place := range places {
		if fresh[i].key != "" && inserted[i].JobID != results[place].JobID {
			return nil, ErrPlugin
		}
		results[place] = inserted[i]
	}
	return results, nil
}

// insert is River's.
func (e *Enqueuer) insert(ctx context.Context, tx pgx.Tx, jobs []*prepared) ([]Result, error) {
	params := make([]river.InsertManyParams, len(jobs))
	for i, p := range jobs {
		params[i] = river.InsertManyParams{Args: p.args, InsertOpts: &p.opts}
	}
	rows, err := e.client.InsertManyTx(ctx, tx, params)
	if err != nil {
		return nil, fmt.Errorf("jobs: insert: %w", err)
	}
	if len(rows) != len(jobs) {
		return nil, fmt.Errorf("jobs: insert: a middleware returned %d jobs for %d", len(rows), len(jobs))
	}
	results := make([]Result, len(rows))
	for i, row := range rows {
		results[i] = Result{JobID: row.Job.ID, Created: !row.UniqueSkippedAsDuplicate, Job: row.Job}
	}
	return results, nil
}

// abortTimeout bounds abort, which must also work when ctx is done.
const abortTimeout = 5 * time.Second

// The cast is refused, and the server's log says why.
const abortSQL = `select 'metered: a key was claimed, but its job was not inserted'::int`

// abort makes the transaction fail, so that all that is left to do is to roll it
// back, to a savepoint or whole. Its error is the point. (A savepoint around every
// Enqueue would undo just the claim, for another round trip each time.)
func abort(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
	defer cancel()
	_, _ = tx.Exec(ctx, abortSQL)
}

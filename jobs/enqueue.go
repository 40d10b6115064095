package jobs

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/observe"
)

// Enqueue inserts a job in tx. A rollback, also to a savepoint, undoes the job and its key. The
// args of a repetition are compared as JSON.
//
// It locks the key's row until tx ends. Keys enqueued in different orders can deadlock: EnqueueMany
// sorts them.
//
// budget.ErrArgument and ErrConflict leave tx usable, other errors abort it. A new key costs a second
// round trip.
func (e *Enqueuer) Enqueue(ctx context.Context, tx pgx.Tx, args river.JobArgs, opts *Options) (Result, error) {
	if err := cmp.Or(e.made(), notNil("tx", tx)); err != nil {
		return Result{}, err
	}
	p, err := e.prepare("", args, opts)
	if err != nil {
		return Result{}, err
	}
	results, err := e.enqueue(ctx, tx, []*prepared{p})
	if err != nil {
		return Result{}, err
	}
	return results[0], nil
}

// EnqueueMany is Enqueue for 1 to 10,000 jobs, in as many round trips as for one. A repeated key
// makes one job. One Config.LockTimeout bounds all waits. Errors but budget.ErrArgument abort tx, unless
// no key was new.
func (e *Enqueuer) EnqueueMany(ctx context.Context, tx pgx.Tx, items []Item) ([]Result, error) {
	if err := cmp.Or(e.made(), notNil("tx", tx)); err != nil {
		return nil, err
	}
	if len(items) < 1 || len(items) > maxItems {
		return nil, invalid("Items", "%d of them: want 1 to %d", len(items), maxItems)
	}
	all := make([]*prepared, len(items))
	for i, item := range items {
		p, err := e.prepare(fmt.Sprintf("Items[%d].", i), item.Args, item.Options)
		if err != nil {
			return nil, err
		}
		all[i] = p
	}
	if err := fewHolds(all); err != nil {
		return nil, err
	}
	return e.enqueue(ctx, tx, all)
}

func (e *Enqueuer) enqueue(ctx context.Context, tx pgx.Tx, all []*prepared) ([]Result, error) {
	results, err := e.enqueueAll(ctx, tx, all)
	if err != nil || e.channel == "" {
		return results, err
	}
	if err := e.notify(ctx, tx, results); err != nil {
		return nil, err
	}
	return results, nil
}

func (e *Enqueuer) enqueueAll(ctx context.Context, tx pgx.Tx, all []*prepared) (results []Result, err error) {
	if e.observer != nil {
		var span observed.Span
		ctx, span = e.observer.Start(ctx, observe.Op{Work: observe.Enqueue, Name: all[0].kind})
		defer func() { e.tell(ctx, span, results, err) }()
	}
	var keyed []*prepared
	for _, p := range all {
		if p.key != "" {
			keyed = append(keyed, p)
		}
	}
	if len(keyed) == 0 {
		return e.insertNew(ctx, tx, all, nil)
	}

	claims, err := e.claimKeys(ctx, tx, keyed)
	if err != nil {
		return nil, fault.Failed("jobs", "claim key", err)
	}
	call := claimed{map[ident]int64{}, map[int64]*rivertype.JobInsertParams{}}
	for i, p := range keyed {
		if claims[i].created {
			call.ids[p.ident()] = claims[i].id
		}
	}
	if len(call.ids) > 0 {
		// From here to the insert the transaction holds keys without jobs. That must
		// not be committed, also not if a hook panics.
		defer func() {
			if err != nil || results == nil {
				abort(ctx, tx)
			}
		}()
		ctx = context.WithValue(ctx, claimedKey{}, call)
	}
	return e.insertNew(ctx, tx, all, claims)
}

// tell reports enqueued jobs to the observer.
func (e *Enqueuer) tell(ctx context.Context, span observed.Span, results []Result, err error) {
	ids, created := make([]int64, len(results)), int64(0)
	for i, r := range results {
		if ids[i] = r.JobID; r.Created {
			created++
		}
	}
	for name, n := range map[string]int64{"created": created, "existing": int64(len(results)) - created} {
		e.count(ctx, name, n, true)
	}
	span.With(observe.End{Err: err, Jobs: ids})
}

// insertNew inserts the jobs whose keys are new or that have none. claims are those
// of the keyed jobs in all, in their order.
func (e *Enqueuer) insertNew(ctx context.Context, tx pgx.Tx, all []*prepared,
	claims []claim) ([]Result, error) {
	results := make([]Result, len(all))
	var fresh []*prepared
	var places []int // of fresh in all
	var gated []int  // in all: new jobs with a hold
	for i, p := range all {
		if p.key != "" {
			c := claims[0]
			claims = claims[1:]
			if what := p.differs(c); what != "" {
				return nil, &conflictError{Queue: p.opts.Queue, Key: p.key, JobID: c.id, Differs: what}
			}
			results[i] = Result{JobID: c.id, Created: c.created}
			if !c.created {
				continue
			}
		}
		if p.parking != nil {
			gated = append(gated, i)
			continue
		}
		fresh, places = append(fresh, p), append(places, i)
	}
	if len(fresh) > 0 {
		inserted, err := e.insert(ctx, tx, fresh)
		if err != nil {
			return nil, err
		}
		for i, place := range places {
			if id := results[place].JobID; fresh[i].key != "" && inserted[i].JobID != id {
				if err := e.renumber(ctx, tx, inserted[i].Job, id); err != nil {
					return nil, err
				}
				inserted[i].JobID = id
			}
			results[place] = inserted[i]
		}
	}
	// Last, since it locks scopes until tx ends.
	if err := e.park(ctx, tx, all, gated, results); err != nil {
		return nil, err
	}
	return results, nil
}

// renumber gives a job the id that River was given for it. Citus 13 puts a new one in its place, as
// into any insert from a select whose expression for the id mentions the sequence.
func (e *Enqueuer) renumber(ctx context.Context, tx pgx.Tx, job *rivertype.JobRow, id int64) error {
	call, _ := ctx.Value(claimedKey{}).(claimed)
	if given := call.given[id]; given == nil || given.ID == nil || *given.ID != id || job == nil {
		return errPlugin
	}
	if tag, err := tx.Exec(ctx, e.renumberSQL, id, job.ID); err != nil {
		return fault.Failed("jobs", "number the job", err)
	} else if tag.RowsAffected() != 1 {
		return errPlugin
	}
	job.ID = id
	return nil
}

// insert is River's.
func (e *Enqueuer) insert(ctx context.Context, tx pgx.Tx, jobs []*prepared) ([]Result, error) {
	params := make([]river.InsertManyParams, len(jobs))
	for i, p := range jobs {
		params[i] = river.InsertManyParams{Args: p.args, InsertOpts: &p.opts}
	}
	rows, err := e.client.InsertManyTx(ctx, answer.Tx(tx), params)
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

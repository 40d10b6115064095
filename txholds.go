package metered

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/holds/holdjobs"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/jobs"
)

// Place is holds.Book.Place as part of the command: made last, with the charges, all
// or none. Nothing is reserved now; a refusal is the error of Do, after the function
// has returned. The hold is in Outcome.Holds, where the holds of Place, Claim, Capture,
// Extend, Release and Refund stand in the order of the calls. It returns the id that the
// hold will have.
//
// cleanup, if not nil, enqueues the hold's cleanup job now (see holdjobs.Cleanup); its errors are those of Enqueue. The other errors are an *ArgumentError,
// a *holds.TTLError, and ErrTxDone.
//
// What is placed is not part of the command's fingerprint.
func (t *Tx) Place(ctx context.Context, r holds.Request, cleanup *holdjobs.Cleanup) (id string, err error) {
	return t.place(ctx, cleanup, r.Tenant, r.TTL+r.Grace, func() (*holdsCall, error) { return placeHold(t.client.Holds, r) })
}

// Claim is holds.Book.Claim as part of the command. Otherwise as Place. The id is the one
// that a new claim will have: if the holder has the key already, Outcome.Holds has that
// claim, with another id.
func (t *Tx) Claim(ctx context.Context, c holds.Claim, cleanup *holdjobs.Cleanup) (id string, err error) {
	return t.place(ctx, cleanup, c.Tenant, c.TTL+c.Grace, func() (*holdsCall, error) { return claimHold(t.client.Holds, c) })
}

func (t *Tx) place(ctx context.Context, cleanup *holdjobs.Cleanup, tenant string, ttl time.Duration, prepare func() (*holdsCall, error)) (string, error) {
	if t.over() {
		return "", ErrTxDone
	}
	p, err := prepare()
	if err != nil {
		return "", err
	}
	if cleanup != nil {
		args, opts, err := cleanup.Job(tenant, p.ID, ttl)
		if err == nil {
			_, err = t.Enqueue(ctx, args, &jobs.Options{Tenant: tenant, InsertOpts: opts})
		}
		if err != nil {
			return "", err
		}
	}
	t.holds = append(t.holds, p)
	return p.ID, nil
}

// Capture is holds.Book.Capture as part of the command, as Place is: made last, all or
// none, with a refusal as the error of Do.
func (t *Tx) Capture(c holds.Capture) error {
	return end(t, captureHolds, c)
}

// Release is holds.Book.Release as part of the command, as Capture is.
func (t *Tx) Release(r holds.Release) error {
	return end(t, releaseHolds, r)
}

// Extend is holds.Book.Extend as part of the command, as Capture is.
func (t *Tx) Extend(e holds.Extend) error {
	return end(t, extendHolds, e)
}

// Refund is holds.Book.Refund as part of the command, as Capture is.
func (t *Tx) Refund(r holds.Refund) error {
	return end(t, refundHolds, r)
}

func end[E any](t *Tx, prepare func(*holds.Book, E) (*holdsCall, error), e E) error {
	if t.over() {
		return ErrTxDone
	}
	p, err := prepare(t.client.Holds, e)
	if err != nil {
		return err
	}
	t.holds = append(t.holds, p)
	return nil
}

const lockAllSQL = `select metered.lock_all($1::bigint[], $2::bigint[], $3::text[], $4::metered.hold_ids[], $5::int)`

// queueSteps queues what the command does to budgets and holds before its charges: credits
// and refunds, and then its holds. If that is more than one call, or if it charges too, all
// locks are taken first, in one order.
func (c *Client) queueSteps(ctx context.Context, batch *pgx.Batch, t *Tx) (locked bool) {
	steps := len(t.entries) + len(t.holds)
	if steps == 0 {
		return false
	}
	wait, _ := c.timeouts(ctx)
	if locked = steps > 1 || t.call != nil; locked {
		keys, idKeys := []int64{}, []int64{} // not nil, which is sent as null
		scopes := []string{}
		var named []ledger.HoldIDs
		if t.call != nil {
			keys = append(keys, t.call.Locks.Keys...)
			scopes = append(scopes, t.call.Locks.Scopes...)
		}
		for _, p := range t.entries {
			keys = append(keys, p.Locks.Keys...)
		}
		for _, p := range t.holds {
			locks := p.Locks
			keys = append(keys, locks.Keys...)
			idKeys = append(idKeys, locks.IDKeys...)
			scopes = append(scopes, locks.Scopes...)
			if locks.Holds != nil {
				named = append(named, *locks.Holds)
			}
		}
		batch.Queue(c.sql.lockAll, inOrder(keys), inOrder(idKeys), scopes, ledger.AllHoldIDs(named), wait)
	}
	sending := ledger.Sending{WaitMS: wait, Namespace: t.op.command.Namespace, Operation: t.op.command.ID, Raising: true}
	for _, p := range t.entries {
		batch.Queue(p.SQL, p.Args(sending)...)
	}
	for _, p := range t.holds {
		batch.Queue(p.SQL, p.Args(sending)...)
	}
	return locked
}

func inOrder(keys []int64) []int64 {
	slices.Sort(keys)
	return slices.Compact(keys)
}

// readSteps reads the answers to what queueSteps queued.
func readSteps(results pgx.BatchResults, t *Tx, locked bool) (done [][]holds.Hold, err error) {
	if locked {
		if _, err := results.Exec(); err != nil {
			return nil, err
		}
	}
	for _, p := range t.entries {
		if _, err := p.Scan(results.QueryRow()); err != nil {
			return nil, err
		}
	}
	for _, p := range t.holds {
		h, err := p.Scan(results.QueryRow())
		if err != nil {
			return nil, err
		}
		done = append(done, h)
	}
	return done, nil
}

// subscribed reports whether subscribers are to hear of what the command did to holds.
func (t *Tx) subscribed() bool {
	return slices.ContainsFunc(t.holds, func(p *holdsCall) bool { return p.Tell != nil })
}

// tell tells them, in the command's transaction, which they cannot end.
func (t *Tx) tell(ctx context.Context, done [][]holds.Hold) error {
	ctx = context.WithValue(ctx, inside{t.client}, true)
	over := new(atomic.Bool)
	defer over.Store(true)
	tx := guardtx.New(t.bare, over)
	for i, p := range t.holds {
		if err := p.Tell(ctx, tx, done[i]); err != nil {
			return err
		}
	}
	return nil
}

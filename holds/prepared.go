package holds

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/savepoint"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/observe"
)

func init() { lend.Lend("holds", internals{}) }

// internals are lent to jobs and metered.
type internals struct{}

// Place prepares Book.Place.
func (internals) Place(b *Book, r Placement) (*ledger.Call[[]Hold], error) { return b.preparePlace(r) }

// Open prepares the hold of a session.
func (internals) Open(b *Book, r Placement, o *ledger.Opening) (*ledger.Call[[]Hold], error) {
	return b.prepareOpen(r, o)
}

// OfSession is the open hold of an operation's session, and its fingerprint.
func (internals) OfSession(ctx context.Context, b *Book, db budget.Querier, tenant, operation,
	holder string) (Hold, []byte, error) {
	return b.ofSession(ctx, db, tenant, operation, holder)
}

// Claim prepares Book.Claim.
func (internals) Claim(b *Book, c Claim) (*ledger.Call[[]Hold], error) { return b.prepareClaim(c) }

// Capture prepares Book.Capture.
func (internals) Capture(b *Book, c Capture) (*ledger.Call[[]Hold], error) {
	return b.prepareCapture(c)
}

// Release prepares Book.Release.
func (internals) Release(b *Book, r Release) (*ledger.Call[[]Hold], error) {
	return b.prepareRelease(r)
}

// Extend prepares Book.Extend.
func (internals) Extend(b *Book, e Extend) (*ledger.Call[[]Hold], error) { return b.prepareExtend(e) }

// Return prepares Book.Return.
func (internals) Return(b *Book, r Return) (*ledger.Call[[]Hold], error) { return b.prepareReturn(r) }

// Park validates the request of a job that waits until it fits. The job's name becomes the hold's
// ID and Holder.
func (internals) Park(b *Book, r Placement) (*ledger.Parking, error) {
	return b.anyHolder().preparePark(r)
}

// Channel is that of transitions, as placements have it, nil for none.
func (internals) Channel(b *Book) any { return b.channel() }

// Ledger is the one that b is on.
func (internals) Ledger(b *Book) *budget.Ledger { return b.ledger }

// Schema is the zero Name for a Book that New has not made.
func (internals) Schema(b *Book) schema.Name { return b.schema }

// AnyHolder is b without Config.RequireHolder.
func (internals) AnyHolder(b *Book) *Book { return b.anyHolder() }

// Tell passes the transitions of a call of a kind to the observer.
func (internals) Tell(ctx context.Context, to *observed.To, kind string, all []Hold, pending bool) {
	tellHolds(ctx, to, kind, all, pending)
}

// Decode reads a hold as it is recorded.
func (internals) Decode(raw []byte) (h Hold, err error) { err = h.decode(raw); return h, err }

// Unknown is ErrUnknown, of a hold that others have or of none.
func (internals) Unknown(others bool) error { return unknown(others) }

// Through makes a call that has a transaction of its own, past what is due.
func (internals) Through(ctx context.Context, b *Book, pool *pgxpool.Pool, call func() error) error {
	name, wait, _ := inBudget.Settings(b.ledger)
	return sweep.Through(ctx, pool, name, wait, call)
}

// inBudget is what package budget lends.
var inBudget = lend.Borrow[interface {
	Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
	Content(scope, use string) string
	Failed(doing string, err error) error
	NoteJSON(n budget.Note) string
	Observer(l *budget.Ledger) *observed.To
	Settings(l *budget.Ledger) (name schema.Name, wait time.Duration, actor bool)
	TellRefused(ctx context.Context, to *observed.To, err error)
	SplitScope(scope string) (kind, key, slot string, err error)
}]("budget")

type charging = ledger.ChargeCall[budget.Receipt]

// tellHolds passes the transitions of a call of a kind to the observer.
func tellHolds(ctx context.Context, to *observed.To, kind string, all []Hold, pending bool) {
	if to == nil {
		return
	}
	for _, h := range all {
		if kind := became(EventKind(kind), h); kind != "" {
			to.Event(ctx, observe.Event{Kind: observe.Hold, Name: string(kind), Pending: pending})
		}
	}
}

// call is a validated call of a Book.
type call = ledger.Call[[]Hold]

// teller passes the transitions of a call to the subscribers, if there are any.
func (b *Book) teller(kind EventKind, note budget.Note) func(context.Context, pgx.Tx, []Hold) error {
	if len(b.cfg.Subscribers) == 0 {
		return nil
	}
	return func(ctx context.Context, tx pgx.Tx, holds []Hold) error {
		for _, h := range holds {
			kind := became(kind, h)
			if kind == "" {
				continue
			}
			if err := b.tell(ctx, tx, Transition{Kind: kind, Hold: h, Note: note}); err != nil {
				return err
			}
		}
		return nil
	}
}

// became is the transition of a hold by a call of a kind, h being the hold after it. It is "" for
// none.
func became(kind EventKind, h Hold) EventKind {
	switch {
	case kind == EventPlaced && !h.Created:
		return ""
	case kind == EventReturned && h.State != Returned:
		return EventReturnedPart
	case kind == EventReleased && h.State == Returned: // Release.Captured
		return EventReturned
	}
	return kind
}

// tell calls the subscribers with a transition. It returns their first error, as a
// *fault.Listener.
func (b *Book) tell(ctx context.Context, tx pgx.Tx, t Transition) error {
	for _, s := range b.cfg.Subscribers {
		err := s(ctx, tx, t)
		if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'E' {
			err = errSwallowed // the transaction has failed, and the next statement would fail instead
		}
		if err != nil {
			return &fault.Listener{Err: err,
				Doing: fmt.Sprintf("holds: a subscriber refused that %q is %s", t.Hold.ID, t.Kind)}
		}
	}
	return nil
}

var errSwallowed = errors.New("holds: a statement of the subscriber failed, and it returned no error")

// do carries out a call in tx.
func do[E any](ctx context.Context, tx pgx.Tx, b *Book, name string,
	prepare func(*Book, E) (*call, error), e E) (holds []Hold, err error) {
	c, err := prepare(b, e)
	if err != nil {
		return nil, err
	}
	if err := notNil("tx", tx); err != nil {
		return nil, err
	}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Call, Name: name})
	defer func() {
		if err == nil {
			tellHolds(ctx, b.observer, c.Kind, holds, true)
		}
		inBudget.TellRefused(ctx, b.observer, err)
		span.End(err)
	}()
	send := func(tx pgx.Tx, telling bool) ([]Hold, error) {
		if len(c.Queries) > 0 {
			lock := ledger.LockAllArgs(b.waitMS(), c.Locks)
			if err := ledger.Ask(ctx, tx, b.sql.lockAll, lock, c.Queries,
				func(err error) error { return failed("place", err) }); err != nil {
				return nil, err
			}
		}
		holds, err := c.Scan(answer.QueryRow(ctx, tx, c.SQL,
			c.Args(ledger.Sending{WaitMS: b.waitMS(), Telling: telling})...))
		if err == nil && c.Tell != nil {
			err = c.Tell(ctx, tx, holds)
		}
		if err == nil && c.Cross != nil {
			err = c.Cross(ctx, tx)
		}
		return holds, err
	}
	if c.Tell != nil {
		return savepoint.In(ctx, tx, "holds", func(sub pgx.Tx) ([]Hold, error) { return send(sub, true) })
	}
	return ledger.SilentlyIn(ctx, tx, "holds", send)
}

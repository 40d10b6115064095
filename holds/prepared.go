package holds

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/observe"
)

func init() {
	lend.PlaceHold, lend.ClaimHold, lend.CaptureHolds = (*Book).preparePlace, (*Book).prepareClaim, (*Book).prepareCapture
	lend.ReleaseHolds, lend.ExtendHolds, lend.RefundHolds = (*Book).prepareRelease, (*Book).prepareExtend, (*Book).prepareRefund
	lend.OpenHold = (*Book).prepareOpen
	lend.BookSchema = func(b *Book) schema.Name { return b.schema }
	lend.UnknownHold = unknown
	lend.AnyHolder = (*Book).anyHolder
	lend.TellHolds = tellHolds
	lend.DecodeHold = func(raw []byte) (h Hold, err error) { err = h.decode(raw); return h, err }
}

// What package budget lends.
var (
	ledgerSettings = lend.LedgerSettings.(func(*budget.Ledger) (schema.Name, time.Duration, bool))
	prepareCharges = lend.Charges.(func(*budget.Ledger, ...budget.Charge) (*charging, error))
	noteJSON       = lend.NoteJSON.(func(budget.Note) string)
	ledgerObserver = lend.LedgerObserver.(func(*budget.Ledger) *observed.To)
	tellDenied     = lend.TellDenied.(func(context.Context, *observed.To, error))
	ledgerFailed   = lend.LedgerFailed.(func(doing string, err error) error)
)

type charging = ledger.ChargeCall[budget.Receipt]

// tellHolds tells the observer what a call of a kind did.
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

// teller tells the subscribers what a call did, if there are any.
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

// became is what a call of a kind did to a hold, which is then h; "" for nothing.
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

// tell tells the subscribers of a transition. The first error of one is returned as a
// *SubscriberError.
func (b *Book) tell(ctx context.Context, tx pgx.Tx, t Transition) error {
	for _, s := range b.cfg.Subscribers {
		err := s(ctx, tx, t)
		if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'E' {
			err = errSwallowed // else whatever comes next in tx would fail for it
		}
		if err != nil {
			return &SubscriberError{ID: t.Hold.ID, Kind: t.Kind, Err: err}
		}
	}
	return nil
}

var errSwallowed = errors.New("holds: a statement of the subscriber failed, and it returned no error")

// SubscriberError is the error of a subscriber, which took a transition back.
type SubscriberError struct {
	ID   string
	Kind EventKind
	Err  error
}

func (e *SubscriberError) Error() string {
	return fmt.Sprintf("holds: a subscriber refused that %q is %s: %v", e.ID, e.Kind, e.Err)
}

func (e *SubscriberError) Unwrap() error { return e.Err }

// do carries out a call in tx.
func do[E any](ctx context.Context, tx pgx.Tx, b *Book, name string, prepare func(*Book, E) (*call, error), e E) (holds []Hold, err error) {
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
		tellDenied(ctx, b.observer, err)
		span.End(err)
	}()
	send := func(tx pgx.Tx) ([]Hold, error) {
		if len(c.Queries) > 0 {
			lock := ledger.LockAllArgs(b.waitMS(), c.Locks)
			if err := ledger.Ask(ctx, tx, b.sql.lockAll, lock, c.Queries, func(err error) error { return failed("place", err) }); err != nil {
				return nil, err
			}
		}
		return c.Scan(tx.QueryRow(ctx, c.SQL, c.Args(ledger.Sending{WaitMS: b.waitMS()})...))
	}
	if c.Tell == nil {
		return send(tx)
	}
	return inSavepoint(ctx, tx, func(sub pgx.Tx) ([]Hold, error) {
		holds, err := send(sub)
		if err == nil {
			err = c.Tell(ctx, sub, holds)
		}
		return holds, err
	})
}

// undoTimeout bounds how long a transition is taken back whose context has ended.
const undoTimeout = 5 * time.Second

// inSavepoint runs fn so that its error, its panic and the end of ctx meanwhile take
// back what it did, and leave tx as usable as it was. Where that cannot be done, since
// fn ended the savepoint or left the connection in use, the connection is closed: the
// caller must not commit what was answered by an error.
func inSavepoint[T any](ctx context.Context, tx pgx.Tx, fn func(pgx.Tx) (T, error)) (result T, err error) {
	sub, err := tx.Begin(ctx)
	if err != nil {
		return result, fmt.Errorf("holds: savepoint: %w", err)
	}
	done := false
	defer func() {
		if done {
			return
		}
		// With a context of its own: under one that has ended nothing is sent.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		if sub.Rollback(ctx) == nil {
			return
		}
		if conn := sub.Conn(); conn != nil {
			_ = conn.Close(ctx)
		}
	}()
	if result, err = fn(sub); err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return result, err
	}
	if err := sub.Commit(ctx); err != nil {
		return result, fmt.Errorf("holds: savepoint: %w", err)
	}
	done = true
	return result, nil
}

package holds

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/ledger"
)

// Prepared is a validated call, for those who send it themselves: together with
// other statements in a pgx.Batch, as package metered does. It has copies of what it was
// made from.
type Prepared struct {
	book   *Book
	sql    string
	args   func(waitMS int32, origin string, raising bool) []any
	locks  Locks
	placed string // ID
	kind   EventKind
	note   budget.Note
	scan   func(pgx.Row) ([]Hold, error)
	failed func(error) error
}

// Decode reads a hold as the functions in schema.sql write it.
func Decode(raw []byte) (Hold, error) {
	var h Hold
	err := h.decode(raw)
	return h, err
}

// SQL is the statement to send with Args, to be read by Scan.
func (p *Prepared) SQL() string { return p.sql }

// Args are the arguments of a statement that waits for its locks at most waitMS milliseconds.
// namespace and operation are recorded in the ledger and in the hold's history; both may be
// empty. With raising, a refusal is an error of Postgres (for Failed), and otherwise a row that
// leaves the transaction usable.
func (p *Prepared) Args(waitMS int32, namespace, operation string, raising bool) []any {
	return p.args(waitMS, ledger.Origin{Namespace: namespace, Operation: operation, Note: p.note.JSON()}.String(), raising)
}

// Locks says what a call locks, in this order: the scopes that it names, and those of the
// holds that it names; the ids of holds that it places; the rows of the holds that it names,
// and of those that are due in scopes that it may charge.
type Locks struct {
	Scopes []string        // that it may charge
	Keys   []int64         // of the locks of Scopes; none for a capture, whose scopes are its hold's
	IDKeys []int64         // of the locks of the ids that it places
	Holds  *ledger.HoldIDs // that it captures, releases, extends or refunds
}

// Locks are what the call locks.
func (p *Prepared) Locks() Locks { return p.locks }

// ID is the id that a placement gives to its hold, if it makes a new one.
func (p *Prepared) ID() string { return p.placed }

// Scan reads the row that SQL returned, with the errors of the call.
func (p *Prepared) Scan(row pgx.Row) ([]Hold, error) { return p.scan(row) }

// Failed turns an error of Postgres into that of the call.
func (p *Prepared) Failed(err error) error { return p.failed(err) }

// Subscribed reports whether Tell has somebody to tell.
func (p *Prepared) Subscribed() bool { return len(p.book.cfg.Subscribers) > 0 }

// Tell tells the Book's subscribers what the call did. The first error of one is
// returned as a *SubscriberError.
func (p *Prepared) Tell(ctx context.Context, tx pgx.Tx, holds []Hold) error {
	for _, h := range holds {
		if p.kind == EventPlaced && !h.Created {
			continue
		}
		kind := p.kind
		if kind == EventReturned && !h.Returned {
			kind = EventReturnedPart
		}
		if err := p.book.tell(ctx, tx, Transition{Kind: kind, Hold: h, Note: p.note}); err != nil {
			return err
		}
	}
	return nil
}

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

// Unwrap returns the subscriber's error.
func (e *SubscriberError) Unwrap() error { return e.Err }

// run carries out a call in tx.
func (p *Prepared) run(ctx context.Context, tx pgx.Tx) ([]Hold, error) {
	if err := notNil("tx", tx); err != nil {
		return nil, err
	}
	if !p.Subscribed() {
		return p.Scan(tx.QueryRow(ctx, p.sql, p.Args(p.book.waitMS(), "", "", false)...))
	}
	return inSavepoint(ctx, tx, func(sub pgx.Tx) ([]Hold, error) {
		holds, err := p.Scan(sub.QueryRow(ctx, p.sql, p.Args(p.book.waitMS(), "", "", false)...))
		if err == nil {
			err = p.Tell(ctx, sub, holds)
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

// Package observed calls the Observer of a program, if it has one.
package observed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/observe"
)

// To is an Observer that cannot do harm. nil is none.
type To struct {
	observer observe.Observer
	once     sync.Once // its first panic
}

// New returns nil for nil.
func New(o observe.Observer) *To {
	if o == nil {
		return nil
	}
	return &To{observer: o}
}

// Observer is what New was given, for a piece that makes its own To.
func (t *To) Observer() observe.Observer {
	if t == nil {
		return nil
	}
	return t.observer
}

// Span is work under way. The zero value has no observer.
type Span struct {
	to  *To
	end func(observe.End)
}

// Start reports the beginning of work. The context is for the work.
func (t *To) Start(ctx context.Context, op observe.Op) (context.Context, Span) {
	if t == nil {
		return ctx, Span{}
	}
	return t.start(ctx, op)
}

func (t *To) start(ctx context.Context, op observe.Op) (inner context.Context, s Span) {
	inner = ctx
	defer t.recovered()
	if own, end := t.observer.Start(ctx, op); own != nil {
		return own, Span{t, end}
	}
	return ctx, s
}

// Acquire is pool.Acquire with its wait reported.
func (t *To) Acquire(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Conn, error) {
	if t == nil {
		return pool.Acquire(ctx)
	}
	ctx, span := t.Start(ctx, observe.Op{Work: observe.Connect})
	conn, err := pool.Acquire(ctx)
	span.End(err)
	return conn, err
}

// End tells of the end.
func (s Span) End(err error) {
	if s.end != nil {
		s.With(observe.End{Err: err})
	}
}

// With is End with more to tell. It fills in the code.
func (s Span) With(e observe.End) {
	if s.end == nil {
		return
	}
	defer s.to.recovered()
	e.Code = fault.Code(e.Err)
	s.end(e)
}

// Event reports an event. N of 0 stands for 1.
func (t *To) Event(ctx context.Context, e observe.Event) {
	if t == nil {
		return
	}
	defer t.recovered()
	e.N = max(e.N, 1)
	t.observer.Event(ctx, e)
}

// Purged tells of rows that are deleted, if there are any.
func (t *To) Purged(ctx context.Context, name string, rows int64) {
	if rows > 0 {
		t.Event(ctx, observe.Event{Kind: observe.Purged, Name: name, N: rows})
	}
}

// Retried tells that a transaction runs again because of err.
func (t *To) Retried(ctx context.Context, err error) {
	if t == nil {
		return
	}
	name := "serialization"
	switch sqlstate.Of(err) {
	case sqlstate.DeadlockDetected:
		name = "deadlock"
	case sqlstate.LeaseClosed:
		name = "lease_closed"
	}
	t.Event(ctx, observe.Event{Kind: observe.Retried, Name: name})
}

// Lost tells that the answer to a COMMIT of n was lost.
func (t *To) Lost(ctx context.Context, n int) {
	t.Event(ctx, observe.Event{Kind: observe.Commit, Name: "lost", N: int64(n)})
}

// Outcomes of a COMMIT whose answer was lost.
const (
	Committed    = "committed"
	NotCommitted = "not_committed"
	Unknown      = "unknown"
	Left         = "left" // unknown to a caller who left: nobody waits for it
)

// Open is the outcome that stayed open for a call with ctx: its caller left, or nobody could find
// out.
func Open(ctx context.Context) string {
	if errors.Is(ctx.Err(), context.Canceled) {
		return Left
	}
	return Unknown
}

// Resolved reports the outcome of one of those.
func (t *To) Resolved(ctx context.Context, as string) {
	t.Event(ctx, observe.Event{Kind: observe.Commit, Name: as})
}

// Never tells that a COMMIT's answer was lost, and that nobody will look for it, if err says so.
func (t *To) Never(ctx context.Context, err, unknown error) {
	if t != nil && errors.Is(err, unknown) {
		t.Lost(ctx, 1)
		t.Resolved(ctx, Open(ctx))
	}
}

// recovered keeps a panic of the observer from the observed work.
func (t *To) recovered() {
	if p := recover(); p != nil {
		t.once.Do(func() {
			slog.Error("metered: the observer panics; further panics are not logged", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		})
	}
}

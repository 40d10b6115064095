package metered

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/observe"
)

// Answers of sessions. Nothing was done.
var (
	ErrRunning  error = errRunning // another session of the operation is open: the error is a *RunningError
	ErrLost     error = errLost    // the session's hold has ended otherwise: the error is a *LostError
	ErrFinished error = fault.New("session_finished", "metered: the operation is on record, and not to be done again")
	// ErrNotRenewed is the cause of a session's context that ends at the hold's deadline, since the hold could not be extended: at its
	// ceiling, or since Postgres could not be reached. Settle works for Reservation.Grace. The error is a *RenewalError.
	ErrNotRenewed error = errNotRenewed
)

var (
	errRunning    = fault.New("session_running", "metered: a session of the operation is open")
	errLost       = fault.New("session_lost", "metered: the session has lost its hold")
	errNotRenewed = fault.New("session_not_renewed", "metered: the session's hold could not be renewed")
)

// RunningError says until when the session that is open is held, unless it is renewed.
type RunningError struct {
	Namespace, ID string        // of the operation
	Until         time.Time     // by the database's clock: then its units are free, and the operation can be opened anew
	RetryAfter    time.Duration // until then
}

func (e *RunningError) Error() string {
	return fmt.Sprintf("%v: operation %q in namespace %q, for another %v unless it is renewed", errRunning, e.ID, e.Namespace, e.RetryAfter)
}

func (e *RunningError) Unwrap() error { return errRunning }

// Code returns the stable code.
func (e *RunningError) Code() string { return errRunning.Code() }

// RetryAfterSeconds is RetryAfter rounded up. It is always ok.
func (e *RunningError) RetryAfterSeconds() (seconds int64, ok bool) {
	return int64((e.RetryAfter + time.Second - 1) / time.Second), true
}

// LostError says why a session cannot be settled, nor cancelled: its hold fell due, somebody ended it, or the operation was
// settled by a session that was opened later.
type LostError struct {
	ID    string // of the operation
	Cause error  // a *holds.StateError, with the present hold, or holds.ErrUnknown or ErrRetired, after a purge
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%v: operation %q: %v", errLost, e.ID, e.Cause)
}

// Unwrap returns ErrLost alone: the end of a hold is no refusal of a command.
func (e *LostError) Unwrap() error { return errLost }

// Code returns the stable code.
func (e *LostError) Code() string { return errLost.Code() }

// RenewalError says why a session's work should end.
type RenewalError struct {
	ID    string    // of the operation
	Due   time.Time // by the database's clock: until then the session can be settled
	Cause error     // of the last try: a *holds.CeilingError at the hold's ceiling
}

func (e *RenewalError) Error() string {
	return fmt.Sprintf("%v: operation %q can be settled until %s: %v", errNotRenewed, e.ID, e.Due.Format(time.RFC3339), e.Cause)
}

// Unwrap returns ErrNotRenewed alone.
func (e *RenewalError) Unwrap() error { return errNotRenewed }

// Code returns the stable code.
func (e *RenewalError) Code() string { return errNotRenewed.Code() }

// Session is work whose cost is held. It is safe for concurrent use.
type Session[R any] struct {
	s        *session
	finished bool
	out      Outcome[R]
}

// session is a Session without the type of its result.
type session struct {
	client      *Client
	r           Reservation
	fingerprint []byte
	id          string // of the hold

	ctx    context.Context // of the work
	cancel context.CancelCauseFunc
	stop   func()        // ends the renewals
	done   chan struct{} // they have ended

	mu       sync.Mutex
	hold     holds.Hold // as it was last seen
	deadline time.Time  // its own, by this process's monotonic clock, at the earliest
	ended    bool
	settles  int // are going on
}

// Context is for the work. It is made from Open's, and ends at Settle, Cancel and Close, when the session is lost
// (*LostError), and at the hold's deadline if it could not be renewed (*RenewalError): context.Cause has the reason. That of a
// finished session has ended (ErrFinished).
func (s *Session[R]) Context() context.Context { return s.s.ctx }

// Finished reports whether the operation is on record: the work must not be done again. Outcome is its answer.
func (s *Session[R]) Finished() bool { return s.finished }

// Outcome is the recorded answer of a finished session, else zero.
func (s *Session[R]) Outcome() Outcome[R] { return s.out }

// Hold is the session's hold as it was last seen: placed, or renewed. That of a finished session is in its Outcome.
func (s *Session[R]) Hold() holds.Hold {
	s.s.mu.Lock()
	defer s.s.mu.Unlock()
	return s.s.hold
}

// Used is the usage of a session's work. Either All or Lines is required.
type Used struct {
	// Lines are the used units, by scope. A scope that is left out was not used. One without Limits has those of the
	// Reservation, which OverIfFits and OverUpTo read: a larger one is an overdraft that is bounded. Limits report thresholds
	// (holds.Capture), with All, too. One by budget.MaxFrom that is not named here does not.
	Lines  []holds.Line
	All    bool        // all that is held was used
	Over   holds.Over  // the rule for a Line beyond the held units. Defaults to holds.OverRefused
	Entity string      // is linked to the hold, as in holds.Capture. Defaults to none
	Note   budget.Note // defaults to that of the Reservation
}

// Settle captures the used units, frees the rest, calls fn (which may be nil) for the caller's writes, records the result, and
// commits: all or nothing. It is the command of the session's ID, so the rules of Do on functions, retries, outcomes and errors
// hold here too. The same again, in any process, is answered by the record. With other amounts it is ErrConflict, which says
// both.
//
// ctx must not be that of a request whose client is gone: context.WithTimeout(context.WithoutCancel(r.Context()), …).
//
// Errors that pass (Retryable: Postgres is away, say) are tried again until ctx ends, or until the hold of the time of the call
// has fallen due, TTL and Grace later at most. So fn may be called again.
//
// After an error the hold is as before, and renewed: settle again, otherwise perhaps, or Cancel. *holds.ExcessError: more was
// used than is held, and Over is OverRefused. *budget.ExceededError: it does not fit. *LostError: the session's hold has ended,
// and nothing is written, also if the operation was settled since.
func (s *Session[R]) Settle(ctx context.Context, used Used, fn Func[R]) (Outcome[R], error) {
	h := s.s
	if s.finished {
		if err := h.agrees(used, s.out.Holds); err != nil {
			return Outcome[R]{}, err
		}
		return s.out, nil
	}
	call, err := inHolds.Capture(h.client.Holds, h.capture(used))
	if err != nil {
		return Outcome[R]{}, renamed(err, "Capture", "Used")
	}
	for i, l := range used.Lines {
		if !slices.ContainsFunc(h.r.Lines, func(of holds.Line) bool { return of.Scope == l.Scope }) {
			return Outcome[R]{}, invalid(fmt.Sprintf("Used.Lines[%d].Scope", i), "%q is not held: the Reservation has no line of it", l.Scope)
		}
	}
	if h.client.engine.Inside(ctx) {
		return Outcome[R]{}, ErrNested
	}
	h.own(call)
	defer h.settle()()
	cmd := h.command(call)
	cmd.settling.until = h.until()
	out, err := run(ctx, h.client, nil, cmd, fn)
	if err == nil && !slices.ContainsFunc(out.Holds, func(of holds.Hold) bool { return of.ID == h.id }) {
		err = &LostError{ID: h.r.ID, Cause: errSettled}
	}
	if err == nil && out.Replayed {
		if err := h.agrees(used, out.Holds); err != nil {
			h.end(nil, sessionSettled)
			return Outcome[R]{}, err
		}
	}
	if err != nil {
		if lost := (*LostError)(nil); errors.As(err, &lost) {
			h.end(lost, sessionLost)
		}
		return Outcome[R]{}, err
	}
	h.end(nil, sessionSettled)
	return out, nil
}

// agrees is a conflict if used differs from the settled units, which the first of the recorded holds has. OverUpTo may have taken
// less than was used.
func (s *session) agrees(used Used, recorded []holds.Hold) error {
	if len(recorded) == 0 {
		return nil
	}
	for _, l := range recorded[0].Lines {
		amount := l.Amount
		if !used.All {
			at := slices.IndexFunc(used.Lines, func(of holds.Line) bool { return of.Scope == l.Scope })
			if amount = 0; at >= 0 {
				amount = used.Lines[at].Amount
			}
		}
		cut := used.Over == holds.OverUpTo && l.Amount <= l.Captured && l.Captured < amount
		if amount != l.Captured && !cut {
			return fmt.Errorf("%w: operation %q in namespace %q was settled with %d units of scope %q, and now with %d",
				ErrConflict, s.r.ID, s.r.Namespace, l.Captured, l.Scope, amount)
		}
	}
	return nil
}

var errSettled = errors.New("the operation was settled by another session")

// capture is the capture of a session.
func (s *session) capture(used Used) holds.Capture {
	lines := slices.Clone(used.Lines)
	fitting := used.Over == holds.OverIfFits || used.Over == holds.OverUpTo
	for _, l := range s.r.Lines {
		limits := slices.DeleteFunc(slices.Clone(l.Limits), func(l budget.Limit) bool { _, known := inBudget.TellsSpent(l); return !known && !fitting })
		at := slices.IndexFunc(lines, func(of holds.Line) bool { return of.Scope == l.Scope })
		tells := slices.ContainsFunc(limits, func(l budget.Limit) bool { tells, _ := inBudget.TellsSpent(l); return tells })
		if at < 0 && used.All && tells {
			lines = append(lines, holds.Line{Scope: l.Scope, Limits: limits})
		} else if at >= 0 && lines[at].Limits == nil {
			lines[at].Limits = limits
		}
	}
	return holds.Capture{
		Tenant: s.r.Namespace, IDs: []string{s.id}, Holder: s.r.Holder, All: used.All, Lines: lines, Over: used.Over,
		Entity: used.Entity, Note: cmp.Or(used.Note, s.r.Note),
	}
}

// Cancel frees the held units and charges none of them. The operation is not recorded: the same ID can be opened anew. reason
// is the hold's from then on. A second call does nothing. *LostError if the session was settled, or has lost its hold.
// Errors that pass are tried again, as by Settle. After *IndefiniteError, which says that the answer to COMMIT was lost, call
// it again. As for Settle, ctx must not be that of a request whose client is gone.
func (s *Session[R]) Cancel(ctx context.Context, reason string) error {
	if s.finished {
		return &LostError{ID: s.s.r.ID, Cause: ErrFinished}
	}
	h := s.s
	if h.client.engine.Inside(ctx) {
		return ErrNested
	}
	defer h.settle()()
	err := h.lost(h.release(ctx, reason, h.until()))
	if errors.Is(err, ErrLost) {
		h.end(err, sessionLost)
	} else if err == nil {
		h.end(nil, sessionCancelled)
	}
	return err
}

// until is when the present hold is due: till then errors that pass are tried again.
func (s *session) until() time.Time { return time.Now().Add(s.left() + s.r.Grace) }

// release releases the session's hold, again after errors that pass, until then. A hold that was released before is no error.
func (s *session) release(ctx context.Context, reason string, until time.Time) (err error) {
	c, note := s.client, s.r.Note
	note.Reason = cmp.Or(reason, note.Reason)
	ctx, span := c.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "holds.release"})
	defer func() { span.End(err) }()
	call, err := inHolds.Release(c.Holds, holds.Release{Tenant: s.r.Namespace, IDs: []string{s.id}, Holder: s.r.Holder, Note: note})
	if err != nil {
		return err
	}
	var refusal error
	var released []holds.Hold
	step := command.Judged(call, &refusal, func(all []holds.Hold) { released = all })
	err = c.engine.Once(ctx, &command.Operation{Namespace: s.r.Namespace, ID: s.r.ID, Until: until}, step)
	lost, state := (*command.Indefinite)(nil), (*holds.StateError)(nil)
	switch err = cmp.Or(err, refusal); {
	case errors.As(err, &lost):
		return &IndefiniteError{Namespace: s.r.Namespace, ID: s.r.ID, cause: lost.Cause}
	case errors.As(err, &state) && state.State == holds.Released:
		return nil
	case err == nil:
		inHolds.Tell(ctx, c.observer, call.Kind, released, false)
	}
	return err
}

// Close ends the session's renewals and its context. A session that is neither settled nor cancelled is left as by a process that died:
// its units are free when its hold falls due. It sends nothing. Defer it.
func (s *Session[R]) Close() { s.s.end(nil, sessionAbandoned) }

// lost makes an error of a call about the session's hold a *LostError, if it says that the hold is not held.
func (s *session) lost(err error) error {
	if errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired) {
		return &LostError{ID: s.r.ID, Cause: err}
	}
	return err
}

// own marks the errors of a call, so that they differ from those of other holds in a command.
func (s *session) own(call *holdsCall) {
	scan := call.Scan
	call.Scan = func(row pgx.Row) ([]holds.Hold, error) {
		all, err := scan(row)
		return all, s.lost(err)
	}
}

// settle takes note that the session is about to end, so that it is not reported as lost. The function that it returns
// takes that back.
func (s *session) settle() (over func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settles++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.settles--
	}
}

// The reports of a session to observers.
const (
	sessionOpened     = "opened"
	sessionRenewed    = "renewed"
	sessionNotRenewed = "not_renewed"
	sessionSettled    = "settled"
	sessionCancelled  = "cancelled"
	sessionLost       = "lost"
	sessionAbandoned  = "abandoned"
)

func (s *session) tell(what string) {
	s.client.observer.Event(s.ctx, observe.Event{Kind: observe.Session, Name: what})
}

// end ends the session, for the cause, and waits for its goroutine.
func (s *session) end(cause error, as string) {
	s.close(cause, as)
	if s.done != nil {
		<-s.done
	}
}

// close ends the session, and reports how, if it has not ended before.
func (s *session) close(cause error, as string) {
	if s.closed(cause) {
		s.tell(as)
	}
}

func (s *session) closed(cause error) (now bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.ended = true
	s.cancel(cause)
	s.stop()
	return true
}

package metered

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/observe"
)

// DefaultTTL is that of a Reservation.
const DefaultTTL = time.Minute

// Reservation declares a session: work whose cost is known at its end. ID and Lines are required.
type Reservation struct {
	// ID, Namespace, Name, Input and IssuedAt are as in Command: Settle is the command of that ID. The fingerprint has Name,
	// Input, IssuedAt and Holder. The cost is the server's estimate, so that a repetition is the same command when prices
	// have changed. Without Input the estimate is part of the command: then Metadata, and the scopes and amounts of Lines and Charges
	// are in the fingerprint, too.
	ID        string
	Namespace string // also the hold's tenant
	Name      string
	Input     any
	IssuedAt  time.Time

	// Lines are the estimate: the units that are held of each scope until Settle. Wallets are scopes, too.
	Lines []holds.Line
	// Charges are spent by Open, all or none, with the hold: rates, a fee for each try. They stay, whatever becomes of the
	// session, and a session that is opened anew is charged again. Defaults to none.
	Charges []budget.Charge

	// TTL is how long the hold lasts without being renewed, within Config.Holds' bounds: how long the units of a process that
	// died stay held. A session renews its hold when a third of it is over. Defaults to DefaultTTL.
	TTL time.Duration
	// Grace is how much longer the hold can be settled, as in holds.Request: a session that could not be renewed ends its work at
	// the deadline, and settles within the grace. Defaults to a quarter of TTL.
	Grace time.Duration

	// OpenTimeout bounds Open, its waits for locks and connections among it, and not the session. A line that does not fit is an error as
	// with a ctx that ends: ErrTimeout, ErrBusy, or *IndefiniteError. Defaults to no bound but ctx, and Config.LockTimeout.
	OpenTimeout time.Duration

	Holder   string // as in holds.Request, like the next two
	Metadata json.RawMessage
	Note     budget.Note // also of the entries of Settle and Cancel, unless these have another. Defaults to none

	Isolation    pgx.TxIsoLevel // of Settle, as in Command, like the next two
	EarlyRelease bool
	LSN          bool
}

// settling has the fields of a session's command that no other has.
type settling struct {
	fingerprint []byte
	capture     *holdsCall // nil where only the record is asked for
	until       time.Time  // of command.Operation
}

// errPurged is the error of asking for a record that was there, and is not any more.
var errPurged = errors.New("metered: the record was purged meanwhile")

// Open reserves the greatest cost of some work, and returns a session that keeps the reservation while the work goes on:
//
//	s, err := metered.Open[Usage](ctx, client, metered.Reservation{ID: key, Namespace: user, Lines: estimate})
//	if err != nil { … }
//	defer s.Close()
//	… the work, with s.Context() …
//	out, err := s.Settle(ctx, metered.Used{Lines: actual}, fn)
//
// The answer to the same ID again depends on its state. Settled: the session is Finished, with the recorded Outcome, and
// nothing is reserved. Open in another process, or in this one: *RunningError, with when to look again. Abandoned, which is
// cancelled, or past its deadline and grace: it is opened anew, by exactly one of the callers. Another command's: ErrConflict.
//
// It is one round trip, in a transaction of its own at READ COMMITTED. Locks: the operation id, then the scopes. Errors:
// *ArgumentError, *holds.TTLError before any SQL, *budget.ExceededError and *budget.ScopeError, which reserve and charge nothing,
// *RunningError, ErrConflict, ErrRetired, ErrFuture, *IndefiniteError, where the answer to COMMIT was lost and not found out
// in time, those of a failed command, and ErrNested inside a command.
//
// The session's context is made from ctx, whose end is that of the work, too. Reservation.OpenTimeout bounds Open alone.
// If ctx ends before Open returns, it returns an error. Its reservation, if there is one, is released in the background, at once,
// or as soon as Postgres can be reached. Its Charges stay.
func Open[R any](ctx context.Context, c *Client, r Reservation) (*Session[R], error) {
	if err := c.made(); err != nil {
		return nil, err
	}
	if c.engine.Inside(ctx) {
		return nil, ErrNested
	}
	opening := ctx
	if r.OpenTimeout > 0 {
		var over context.CancelFunc
		opening, over = context.WithTimeout(ctx, r.OpenTimeout)
		defer over()
	}
	for {
		s, err := c.reserve(opening, r)
		if err == nil {
			if ctx.Err() != nil {
				go s.forsake(ctx, nil)
				return nil, fmt.Errorf("metered: %w", pause.Ended(ctx))
			}
			s.start(ctx)
			s.tell(sessionOpened)
			return &Session[R]{s: s}, nil
		}
		if !errors.Is(err, errRecorded) {
			return nil, err
		}
		out, err := run[R](opening, c, nil, s.command(nil), nil)
		if errors.Is(err, errPurged) {
			continue // between the two
		}
		if err != nil {
			return nil, err
		}
		work, cancel := context.WithCancelCause(ctx)
		cancel(ErrFinished)
		s.ctx, s.ended = work, true
		return &Session[R]{s: s, finished: true, out: out}, nil
	}
}

// errRecorded says that the operation is on record.
var errRecorded = errors.New("metered: the operation is on record")

// reserve places the hold of a session. On errRecorded the session is there, too.
func (c *Client) reserve(ctx context.Context, r Reservation) (_ *session, err error) {
	ctx, span := c.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "metered.open"})
	defer func() { span.End(err) }()
	s := &session{client: c, r: r}
	call, op, err := s.prepare()
	if err != nil {
		return nil, err
	}
	var refusal error
	began := time.Now()
	step := command.Judged(call, &refusal, func(all []holds.Hold) { s.hold = all[0] })
	place := func(ctx context.Context) error {
		return ledger.Silently(func(telling bool) error {
			op.Telling = op.Telling || telling
			return cmp.Or(c.engine.Once(ctx, op, step), refusal)
		})
	}
	err = place(ctx)
	c.check.Doubt(err)
	lost := (*command.Indefinite)(nil)
	switch {
	case errors.As(err, &lost):
		go s.forsake(ctx, func(ctx context.Context, until time.Time) error {
			op.Until = until
			return place(ctx)
		})
		return nil, &IndefiniteError{Namespace: r.Namespace, ID: r.ID, cause: lost.Cause}
	case errors.Is(err, errRecorded):
		return s, err
	case err != nil:
		if c.cfg.Leases != nil {
			inLeases.Learn(c.cfg.Leases, err)
		}
		inBudget.TellDenied(ctx, c.observer, err)
		denied := s.command(nil)
		denied.Charges, denied.Holds = s.r.Charges, []holds.Request{s.request()}
		return nil, c.deny(ctx, denied, nil, err)
	case s.hold.State != holds.Held: // it was placed by an attempt whose answer was lost, and has ended since
		return nil, &LostError{ID: r.ID, Cause: &holds.StateError{ID: s.hold.ID, State: s.hold.State, Hold: s.hold}}
	}
	s.id, s.deadline = s.hold.ID, began.Add(s.hold.Remaining())
	inHolds.Tell(ctx, c.observer, call.Kind, []holds.Hold{s.hold}, false)
	return s, nil
}

// forsake releases the hold of an Open whose caller is gone. placed is nil, or makes sure that it is placed, after a
// COMMIT whose answer was lost: the server may still carry that out, and a hold that is there is not placed again.
func (s *session) forsake(ctx context.Context, placed func(ctx context.Context, until time.Time) error) {
	until := time.Now().Add(s.r.TTL + s.r.Grace) // when it is due in any case
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), until)
	defer cancel()
	if placed != nil && placed(ctx, until) != nil || s.hold.State != holds.Held {
		return
	}
	s.id = s.hold.ID
	_ = s.release(ctx, "the caller of Open has left", until)
}

// request is the hold of a session.
func (s *session) request() holds.Request {
	r := &s.r
	return holds.Request{
		Tenant: r.Namespace, Holder: r.Holder, Lines: r.Lines, Charges: r.Charges, TTL: r.TTL, Grace: r.Grace, Metadata: r.Metadata, Note: r.Note,
	}
}

// prepare validates a reservation, and makes the call that places its hold.
func (s *session) prepare() (*holdsCall, *command.Operation, error) {
	r := &s.r
	if r.OpenTimeout < 0 {
		return nil, nil, invalid("Reservation.OpenTimeout", "is %v, want 0 or more", r.OpenTimeout)
	}
	r.TTL = cmp.Or(r.TTL, DefaultTTL)
	r.Grace = cmp.Or(r.Grace, (r.TTL / 4).Truncate(time.Microsecond))
	r.Lines, r.Charges = slices.Clone(r.Lines), slices.Clone(r.Charges)
	op := &command.Operation{
		Namespace: r.Namespace, ID: r.ID, Name: r.Name,
		Key: lockkey.OfOperation(s.client.schema.String(), r.Namespace, r.ID),
	}
	// The arguments that Settle will send are checked now.
	if _, err := s.client.prepare(s.command(nil), nil); err != nil {
		return nil, nil, renamed(err, "Command", "Reservation")
	}
	call, err := inHolds.Open(s.client.Holds, s.request(), &ledger.Opening{
		Operation: r.ID,
		Command: func() string {
			sent := ledger.Command{Namespace: r.Namespace, ID: r.ID, Key: op.Key, IssuedAt: issuedAt(s.command(nil)), MaxFuture: s.client.cfg.MaxFuture}
			return sent.String()
		},
		Fingerprint: func(placing []byte) []byte {
			identity := append([]byte("session\x00"), placing...)
			if r.Input != nil {
				identity = []byte("session of input\x00" + r.Holder)
			}
			s.fingerprint, _ = fingerprint(s.command(nil), ledger.PresentedToken{}, []*ledger.Placing{{Identity: identity}})
			return s.fingerprint
		},
		Refused: s.refused,
	})
	return call, op, renamed(err, "Request", "Reservation")
}

// renamed is err with the name that the caller knows the argument by.
func renamed(err error, from, to string) error {
	var argument *ArgumentError
	if errors.As(err, &argument) {
		if field, ok := strings.CutPrefix(argument.Field, from); ok {
			return invalid(to+field, "%s", argument.Reason)
		}
	}
	return err
}

// command is that of Settle, with its capture.
func (s *session) command(capture *holdsCall) Command {
	r := &s.r
	return Command{
		ID: r.ID, Namespace: r.Namespace, Name: r.Name, Input: r.Input, IssuedAt: r.IssuedAt,
		Isolation: r.Isolation, EarlyRelease: r.EarlyRelease, LSN: r.LSN,
		settling: &settling{fingerprint: s.fingerprint, capture: capture},
	}
}

// refused is the error for an answer of open_session.
func (s *session) refused(status string, at, due *time.Time) error {
	switch status {
	case "replay":
		return errRecorded
	case "retired":
		return ErrRetired
	case "future":
		return ErrFuture
	case "busy":
		return fmt.Errorf("%w: %q in namespace %q", ErrConflict, s.r.ID, s.r.Namespace)
	case "running":
		return &RunningError{Namespace: s.r.Namespace, ID: s.r.ID, Until: due.UTC(), RetryAfter: due.Sub(*at)}
	}
	return fmt.Errorf("metered: the schema answers %q, which this build does not know", status)
}

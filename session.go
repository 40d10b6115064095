package metered

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/observe"
)

const defaultSessionTTL = time.Minute

// Reservation is a session to open. ID and Lines are required.
type Reservation struct {
	// ID is as in Command, and so are Tenant, Name, Input and IssuedAt. The same ID with another
	// Holder is budget.ErrConflict, and so it is without Input with other Metadata, scopes or
	// amounts.
	ID string

	// Tenant is as in Command. It is also the hold's tenant.
	Tenant string

	// Name is as in Command.
	Name string

	// IssuedAt is as in Command.
	IssuedAt time.Time

	// Input is as in Command. Settle asks for it if its function charges, credits, refunds or calls
	// holds, and then refuses a session without one: the work is done by then.
	Input any

	// Lines are the estimate. They are held until Settle.
	Lines []holds.Line

	// UpTo is as in holds.Placement. Session.Hold has the units.
	UpTo bool

	// Charges are spent at each opening.
	Charges []budget.Charge

	// TTL is how long a dead process keeps its Lines, within the bounds of Config.Holds. An open
	// session renews its hold after a third of it. Defaults to 1m.
	TTL time.Duration

	// Grace is the time for Settle after the hold was not renewed. Defaults to a quarter of TTL.
	Grace time.Duration

	// OpenTimeout bounds Open, and not the session.
	OpenTimeout time.Duration

	// Holder is as in holds.Placement, and so is Metadata.
	Holder string

	// Metadata is as in holds.Placement.
	Metadata json.RawMessage

	// Note is as in holds.Placement. It is also the Note of Settle and Cancel, unless these have
	// another.
	Note budget.Note

	// Isolation is the isolation level of Settle, as in Command.
	Isolation pgx.TxIsoLevel

	// LSN is as in Command, of Settle.
	LSN bool

	// EarlyRelease releases the locks of Open, Settle and Cancel before their commits are durable.
	// Each returns when its own is. A refused Open waits for the disk, too. OpenTx ignores it.
	EarlyRelease bool
}

// settling has the fields of a session's command that no other has.
type settling struct {
	fingerprint []byte
	capture     *holdsCall // nil where only the record is asked for
	until       time.Time  // of command.Operation
}

// errPurged: the record was there at the first look, and is gone at the second.
var errPurged = errors.New("metered: the record was purged meanwhile")

// Open reserves the greatest cost of some work. Its session keeps the reservation while the work
// goes on with Session.Context, until Settle (docs/streaming.md).
//
// The same ID again: once settled, the session is Finished. While it is open, *RunningError. After
// Cancel, or past its deadline and grace, one caller opens it anew. For another command,
// budget.ErrConflict.
//
// Open is one round trip, in its own transaction. Locks: the operation id, then the scopes. A
// refusal reserves and charges nothing. Other errors are those of Do. The session's context ends
// with ctx. If ctx ends before Open returns, the reservation is released in the background, and its
// Charges stay.
func Open[R any](ctx context.Context, c *Client, r Reservation) (*Session[R], error) {
	if err := c.made(); err != nil {
		return nil, err
	}
	if c.engine.Inside(ctx) {
		return nil, command.ErrNested
	}
	opening := ctx
	if r.OpenTimeout > 0 {
		var over context.CancelFunc
		opening, over = context.WithTimeout(ctx, r.OpenTimeout)
		defer over()
	}
	for {
		s, err := c.reserve(opening, nil, r)
		if err == nil {
			if ctx.Err() != nil {
				go s.forsake(ctx, nil)
				return nil, fmt.Errorf("metered: %w", pause.Ended(ctx))
			}
			s.start(ctx)
			s.tell(sessionOpened, false)
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
		return finished(ctx, s, out), nil
	}
}

// OpenTx is Open inside the caller's transaction, in a savepoint: after a refusal tx is as before,
// and usable. The reservation takes effect with the caller's commit.
//
// The session renews its hold from then on. Its first renewal comes after a third of TTL: a tx that
// is open for longer than TTL loses the reservation (ErrNotRenewed). After a rollback there is no
// hold, and Settle is ErrLost: Close the session.
//
// The scopes stay locked until tx ends, so commit before the work begins. Nothing is retried, and
// OpenTimeout is refused: set one on tx. tx must be READ COMMITTED, or OpenTx is a *budget.ArgumentError:
// at the other levels it could not see another session of the ID. A replay and its errors are those
// of DoTx.
func OpenTx[R any](ctx context.Context, c *Client, tx pgx.Tx, r Reservation) (*Session[R], error) {
	if err := cmp.Or(c.made(), notNil("tx", tx)); err != nil {
		return nil, err
	}
	if r.OpenTimeout != 0 {
		return nil, misuse("Reservation.OpenTimeout", "is the caller's, who began the transaction")
	}
	s, err := c.reserve(ctx, tx, r)
	var refused *pgconn.PgError
	switch {
	case err == nil:
		s.pending = true
		s.start(ctx)
		s.tell(sessionOpened, true)
		return &Session[R]{s: s}, nil
	case errors.As(err, &refused) && refused.Message == "out of bounds: session":
		return nil, misuse("tx", "is not READ COMMITTED, the level at which a session opens")
	case !errors.Is(err, errRecorded):
		return nil, err
	}
	out, err := run[R](ctx, c, tx, s.command(nil), nil)
	if err != nil {
		return nil, err
	}
	return finished(ctx, s, out), nil
}

// finished is the session of an operation on record.
func finished[R any](ctx context.Context, s *session, out Outcome[R]) *Session[R] {
	work, cancel := context.WithCancelCause(ctx)
	cancel(ErrFinished)
	s.ctx, s.ended = work, true
	return &Session[R]{s: s, finished: true, out: out}
}

// errRecorded says that the operation is on record.
var errRecorded = errors.New("metered: the operation is on record")

// reserve places the hold of a session, in tx or, if that is nil, in a transaction of its own. On
// errRecorded the session is there, too.
func (c *Client) reserve(ctx context.Context, tx pgx.Tx, r Reservation) (_ *session, err error) {
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
			if tx != nil {
				return c.engine.OnceTx(ctx, tx, op, step, &refusal)
			}
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
		return nil, &IndefiniteError{Tenant: r.Tenant, ID: r.ID, cause: lost.Cause}
	case errors.Is(err, errRecorded):
		return s, err
	case err != nil:
		if c.cfg.Leases != nil {
			inLeases.Learn(c.cfg.Leases, err)
		}
		inBudget.TellRefused(ctx, c.observer, err)
		refused := s.command(nil)
		refused.Charges, refused.Holds = s.r.Charges, []holds.Placement{s.request()}
		return nil, c.reportRefusal(ctx, refused, nil, err)
	case s.hold.State != holds.Held: // it was placed by an attempt whose answer was lost, and has ended since
		return nil, &lostError{ID: r.ID, Cause: &holds.StateError{ID: s.hold.ID,
			State: s.hold.State, Hold: s.hold}}
	}
	s.id, s.deadline = s.hold.ID, began.Add(s.hold.Remaining())
	inHolds.Tell(ctx, c.observer, call.Kind, []holds.Hold{s.hold}, tx != nil)
	return s, nil
}

// forsake releases the hold of an Open whose caller is gone. placed is nil, or makes sure that it
// is placed, after a COMMIT whose answer was lost: the server may still carry that out, and a hold
// that is there is not placed again.
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
func (s *session) request() holds.Placement {
	r := &s.r
	return holds.Placement{
		Tenant: r.Tenant, Holder: r.Holder, Lines: r.Lines, UpTo: r.UpTo, Charges: r.Charges,
		TTL: r.TTL, Grace: r.Grace, Metadata: r.Metadata, Note: r.Note,
	}
}

// prepare validates a reservation, and makes the call that places its hold.
func (s *session) prepare() (*holdsCall, *command.Operation, error) {
	r := &s.r
	if r.OpenTimeout < 0 {
		return nil, nil, invalid("Reservation.OpenTimeout", "is %v, want 0 or more", r.OpenTimeout)
	}
	r.TTL = cmp.Or(r.TTL, defaultSessionTTL)
	r.Grace = cmp.Or(r.Grace, (r.TTL / 4).Truncate(time.Microsecond))
	r.Lines, r.Charges = slices.Clone(r.Lines), slices.Clone(r.Charges)
	op := &command.Operation{
		Tenant: r.Tenant, ID: r.ID, Name: r.Name,
		Key: lockkey.OfOperation(s.client.schema.String(), r.Tenant, r.ID), Enter: s.client.home.Statement(),
		EarlyRelease: r.EarlyRelease,
	}
	// The arguments that Settle will send are checked now.
	if _, err := s.client.prepare(s.command(nil), nil); err != nil {
		return nil, nil, renamed(err, "Command", "Reservation")
	}
	call, err := inHolds.Open(s.client.Holds, s.request(), &ledger.Opening{
		Operation: r.ID,
		Command: func() string {
			sent := ledger.Command{Tenant: r.Tenant, ID: r.ID, Key: op.Key,
				IssuedAt: issuedAt(s.command(nil)), MaxFuture: s.client.cfg.MaxFuture}
			return sent.String()
		},
		Plain: func() []any {
			future := pgtype.Interval{Microseconds: s.client.cfg.MaxFuture.Microseconds(), Valid: true}
			return []any{r.ID, op.Key, issuedAt(s.command(nil)), future}
		},
		Fingerprint: func(placing []byte) []byte {
			identity := append([]byte("session\x00"), placing...)
			if r.Input != nil {
				identity = []byte("session of input\x00" + r.Holder)
			}
			s.fingerprint, _ = fingerprint(s.command(nil), ledger.PresentedToken{},
				[]*ledger.Placing{{Identity: identity}})
			return s.fingerprint
		},
		Refused: s.refused,
	})
	return call, op, renamed(err, "Placement", "Reservation")
}

// renamed is err with the name that the caller knows the argument by.
func renamed(err error, from, to string) error {
	var argument *budget.ArgumentError
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
		ID: r.ID, Tenant: r.Tenant, Name: r.Name, Input: r.Input, IssuedAt: r.IssuedAt,
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
		return command.ErrRetired
	case "future":
		return command.ErrFuture
	case "busy":
		return fmt.Errorf("%w: %q of tenant %q", command.ErrConflict, s.r.ID, s.r.Tenant)
	case "running":
		return &RunningError{Tenant: s.r.Tenant, ID: s.r.ID, Until: due.UTC(), RetryAfter: due.Sub(*at)}
	}
	return fmt.Errorf("metered: the schema answers %q, which this build does not know", status)
}

// Session is safe for concurrent use.
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
	settles  int  // are going on
	pending  bool // the transaction of OpenTx was not seen to commit. For the renewals
	given    bool // SettleTx has settled in a transaction, which may roll back
}

// made refuses a Session that Open, OpenTx and Resume did not return, such as the nil that they
// return with an error.
func (s *Session[R]) made() error {
	if s == nil || s.s == nil {
		return misuse("session", "was not returned by Open, OpenTx or Resume")
	}
	return nil
}

// Context is for the work. It ends with Open's, at Settle, Cancel and Close, when the session is
// lost (ErrLost), and at the hold's deadline if it was not renewed (ErrNotRenewed):
// context.Cause has the reason. That of a nil Session has ended.
func (s *Session[R]) Context() context.Context {
	if err := s.made(); err != nil {
		none, end := context.WithCancelCause(context.Background())
		end(err)
		return none
	}
	return s.s.ctx
}

// Finished reports whether the operation is on record: do not work again.
func (s *Session[R]) Finished() bool { return s != nil && s.finished }

// Outcome is zero, unless Finished.
func (s *Session[R]) Outcome() (out Outcome[R]) {
	if s != nil {
		out = s.out
	}
	return out
}

// Hold is the hold as it was placed or last renewed.
func (s *Session[R]) Hold() holds.Hold {
	if s.made() != nil {
		return holds.Hold{}
	}
	s.s.mu.Lock()
	defer s.s.mu.Unlock()
	return s.s.hold
}

// Cost is a session's usage: All or Lines.
type Cost struct {
	// Lines are the used units. A line without Limits has those of the Reservation.
	Lines []holds.Line

	// All spends all that is held.
	All bool

	// Over says what happens to a Line beyond the held units. Defaults to holds.OverRefused.
	Over holds.Over

	// Entity is as in holds.Capture.
	Entity string

	// Note defaults to that of the Reservation.
	Note budget.Note
}

// Settle captures the used units, frees the rest, calls fn (which may be nil), records the result,
// and commits. A repetition is answered by the record, and other amounts are budget.ErrConflict.
//
// ctx must outlive a request whose client may go:
// context.WithTimeout(context.WithoutCancel(r.Context()), …). Retryable errors are tried again
// until ctx ends or the hold is due.
//
// After an error the hold is as before, and renewed: settle again, or Cancel. Errors:
// *holds.ExcessError, *budget.ExceededError, ErrLost.
func (s *Session[R]) Settle(ctx context.Context, used Cost, fn Func[R]) (Outcome[R], error) {
	if err := s.made(); err != nil {
		return Outcome[R]{}, err
	}
	if s.s.client.engine.Inside(ctx) && !s.finished {
		return Outcome[R]{}, command.ErrNested
	}
	out, err := s.settle(ctx, nil, used, fn)
	if lost := (*lostError)(nil); errors.As(err, &lost) {
		s.s.end(lost, sessionLost)
	} else if err == nil && !s.finished {
		s.s.end(nil, sessionSettled)
	}
	return out, err
}

// SettleTx is Settle inside the caller's transaction, in a savepoint: after an error tx is as
// before, and usable. The settlement takes effect with the caller's commit, and so does its record.
//
// The hold and the scopes stay locked until tx ends: make it the last thing. The session goes on
// until Close, and so do its renewals: after a rollback, settle again, or Cancel. Nothing is
// retried. Reservation.Isolation, EarlyRelease and LSN are refused. In a replay (Outcome.Replayed)
// writes that the caller made in tx are there a second time: roll back, or make them in fn.
func (s *Session[R]) SettleTx(ctx context.Context, tx pgx.Tx, used Cost, fn Func[R]) (Outcome[R], error) {
	if err := cmp.Or(s.made(), notNil("tx", tx)); err != nil {
		return Outcome[R]{}, err
	}
	if err := lendable("Reservation", s.s.command(nil)); err != nil {
		return Outcome[R]{}, err
	}
	out, err := s.settle(ctx, tx, used, fn)
	if err == nil && !s.finished {
		s.s.give(!out.Replayed)
	}
	return out, err
}

// settle settles the session in tx, or in a transaction of its own if that is nil.
func (s *Session[R]) settle(ctx context.Context, tx pgx.Tx, used Cost, fn Func[R]) (Outcome[R], error) {
	h := s.s
	if s.finished {
		if err := h.agrees(used, s.out.Holds); err != nil {
			return Outcome[R]{}, err
		}
		return s.out, nil
	}
	call, err := inHolds.Capture(h.client.Holds, h.capture(used))
	if err != nil {
		return Outcome[R]{}, renamed(err, "Capture", "Cost")
	}
	for i, l := range used.Lines {
		if !slices.ContainsFunc(h.r.Lines, func(of holds.Line) bool { return of.Scope == l.Scope }) {
			return Outcome[R]{}, invalid(fmt.Sprintf("Cost.Lines[%d].Scope", i),
				"%q is not held: the Reservation has no line of it", l.Scope)
		}
	}
	h.own(call)
	defer h.settle()()
	cmd := h.command(call)
	cmd.settling.until = h.until()
	out, err := run(ctx, h.client, tx, cmd, fn)
	if err == nil && !slices.ContainsFunc(out.Holds, func(of holds.Hold) bool { return of.ID == h.id }) {
		err = &lostError{ID: h.r.ID, Cause: errSettled}
	}
	if err == nil && out.Replayed {
		if err := h.agrees(used, out.Holds); err != nil {
			if tx == nil {
				h.end(nil, sessionSettled)
			}
			return Outcome[R]{}, err
		}
	}
	if err != nil {
		return Outcome[R]{}, err
	}
	return out, nil
}

// agrees is a conflict if used differs from the settled units, which the first of the recorded
// holds has. OverUpTo and OverEvenly may have taken less than was used.
func (s *session) agrees(used Cost, recorded []holds.Hold) error {
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
		cut := (used.Over == holds.OverUpTo || used.Over == holds.OverEvenly) &&
			l.Amount <= l.Captured && l.Captured < amount
		if amount != l.Captured && !cut {
			return fmt.Errorf("%w: operation %q of tenant %q was settled with %d units of scope %q, and now with %d",
				command.ErrConflict, s.r.ID, s.r.Tenant, l.Captured, l.Scope, amount)
		}
	}
	return nil
}

var errSettled = errors.New("the operation was settled by another session")

// capture is the capture of a session.
func (s *session) capture(used Cost) holds.Capture {
	lines := slices.Clone(used.Lines)
	fitting := used.Over == holds.OverIfFits || used.Over == holds.OverUpTo || used.Over == holds.OverEvenly
	for _, l := range s.r.Lines {
		limits := slices.DeleteFunc(slices.Clone(l.Limits),
			func(l budget.Limit) bool {
				_,
					known := inBudget.TellsSpent(l)
				return !known && !fitting
			})
		at := slices.IndexFunc(lines, func(of holds.Line) bool { return of.Scope == l.Scope })
		tells := slices.ContainsFunc(limits,
			func(l budget.Limit) bool { tells, _ := inBudget.TellsSpent(l); return tells })
		if at < 0 && used.All && tells {
			lines = append(lines, holds.Line{Scope: l.Scope, Limits: limits})
		} else if at >= 0 && lines[at].Limits == nil {
			lines[at].Limits = limits
		}
	}
	return holds.Capture{
		Tenant: s.r.Tenant, IDs: []string{s.id}, Holder: s.r.Holder, All: used.All, Lines: lines,
		Over:   used.Over,
		Entity: used.Entity, Note: cmp.Or(used.Note, s.r.Note),
	}
}

// Cancel frees the held units. The same ID can be opened anew. The hold keeps the reason. A second
// call does nothing. After Settle, or without its hold, it is ErrLost. Otherwise as Settle.
func (s *Session[R]) Cancel(ctx context.Context, reason string) error {
	if err := s.made(); err != nil {
		return err
	}
	if s.finished {
		return &lostError{ID: s.s.r.ID, Cause: ErrFinished}
	}
	h := s.s
	if h.client.engine.Inside(ctx) {
		return command.ErrNested
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

// until is when the present hold is due: till then transient errors are tried again.
func (s *session) until() time.Time { return time.Now().Add(s.left() + s.r.Grace) }

// release releases the session's hold, again after transient errors, until then. A hold that was
// released before is no error.
func (s *session) release(ctx context.Context, reason string, until time.Time) (err error) {
	c, note := s.client, s.r.Note
	note.Reason = cmp.Or(reason, note.Reason)
	ctx, span := c.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "holds.release"})
	defer func() { span.End(err) }()
	call, err := inHolds.Release(c.Holds,
		holds.Release{Tenant: s.r.Tenant, IDs: []string{s.id}, Holder: s.r.Holder, Note: note})
	if err != nil {
		return err
	}
	var refusal error
	var released []holds.Hold
	step := command.Judged(call, &refusal, func(all []holds.Hold) { released = all })
	err = c.engine.Once(ctx, &command.Operation{Tenant: s.r.Tenant, ID: s.r.ID, Until: until,
		Enter: c.home.Statement(), EarlyRelease: s.r.EarlyRelease}, step)
	lost, state := (*command.Indefinite)(nil), (*holds.StateError)(nil)
	switch err = cmp.Or(err, refusal); {
	case errors.As(err, &lost):
		return &IndefiniteError{Tenant: s.r.Tenant, ID: s.r.ID, cause: lost.Cause}
	case errors.As(err, &state) && state.State == holds.Released:
		return nil
	case err == nil:
		inHolds.Tell(ctx, c.observer, call.Kind, released, false)
	}
	return err
}

// Close ends the session's renewals and context: defer it. Units not settled or cancelled are free
// when the hold falls due. That of a nil Session does nothing, so it may be deferred before the
// error of Open is looked at.
func (s *Session[R]) Close() {
	if s.made() == nil {
		s.s.end(nil, sessionAbandoned)
	}
}

// lost makes an error of a call about the session's hold ErrLost, if it says that the hold is
// not held.
func (s *session) lost(err error) error {
	if errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired) {
		return &lostError{ID: s.r.ID, Cause: err}
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

// settle takes note that the session is about to end, so that it is not reported as lost. The
// function that it returns takes that back.
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
	sessionResumed    = "resumed"
	sessionRenewed    = "renewed"
	sessionNotRenewed = "not_renewed"
	sessionSettled    = "settled"
	sessionCancelled  = "cancelled"
	sessionLost       = "lost"
	sessionAbandoned  = "abandoned"
)

// tell reports what has become of the session. pending: once the caller's transaction commits.
func (s *session) tell(what string, pending bool) {
	s.client.observer.Event(s.ctx, observe.Event{Kind: observe.Session, Name: what, Pending: pending})
}

// give takes note that a transaction of the caller has settled the session, once it commits.
func (s *session) give(tell bool) {
	s.mu.Lock()
	first := !s.given && !s.ended
	s.given = true
	s.mu.Unlock()
	if first && tell {
		s.tell(sessionSettled, true)
	}
}

// end ends the session, for the cause, and waits for its goroutine.
func (s *session) end(cause error, as string) {
	s.close(cause, as)
	if s.done != nil {
		<-s.done
	}
}

// close ends the session, and reports how, if it has not ended before, and SettleTx has not told.
func (s *session) close(cause error, as string) {
	now, told := s.closed(cause)
	if now && (!told || as == sessionLost || as == sessionCancelled) {
		s.tell(as, false)
	}
}

// closed ends the session, unless it has ended before. told: SettleTx has reported that.
func (s *session) closed(cause error) (now, told bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false, s.given
	}
	s.ended = true
	s.cancel(cause)
	s.stop()
	return true, s.given
}

// start begins to renew the session's hold. The work may end, by ctx, before it is settled.
func (s *session) start(ctx context.Context) {
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.done = make(chan struct{})
	var renewing context.Context
	renewing, s.stop = context.WithCancel(context.WithoutCancel(ctx)) // a renewal on its way does not keep the session from ending
	go s.renewals(renewing)
}

// renewals renews the hold whenever about a third of its TTL is over, and sooner after an error,
// until the session ends. The jitter keeps sessions that were opened at once from being renewed at
// once. A hold that cannot be renewed is passed to the work: at the deadline, since it can still be
// settled within its grace, or at once if it has ended.
func (s *session) renewals(ctx context.Context) {
	defer close(s.done)
	ttl := s.r.TTL
	var failed error
	for {
		pause := s.left()
		if failed == nil {
			pause -= ttl*2/3 + rand.N(ttl/10+1)
		} else if !errors.Is(failed, holds.ErrCeiling) {
			pause = min(pause, ttl/20+rand.N(ttl/20+1), 5*time.Second)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(pause, 0)):
		}
		if failed != nil && s.left() <= 0 {
			s.cancel(&renewalError{ID: s.r.ID, Due: s.due(), Cause: failed})
			return
		}
		failed = s.renew(ctx)
		switch {
		case failed == nil:
			s.tell(sessionRenewed, false)
		case ctx.Err() != nil: // the session ends
		case s.gave(failed):
			s.close(nil, sessionSettled)
			return
		case errors.Is(failed, ErrLost) && !s.settling():
			s.close(failed, sessionLost)
			return
		case !errors.Is(failed, ErrLost) && !errors.Is(failed, holds.ErrCeiling):
			s.tell(sessionNotRenewed, false)
		}
	}
}

var (
	errInGrace = errors.New("metered: the hold is past its deadline, and in its grace")
	errPending = errors.New("metered: the transaction of OpenTx has not committed")
)

// renew makes the hold last for TTL from now, or until its ceiling.
func (s *session) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, max(s.left()/2, 100*time.Millisecond)) // another connection may fare better
	defer cancel()
	began := time.Now()
	var h holds.Hold
	err := s.client.RunTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted},
		func(ctx context.Context, tx pgx.Tx) (err error) {
			book := s.client.Holds
			if h, err = book.Get(ctx, tx, s.r.Tenant, s.id, s.r.Holder); err != nil {
				if s.pending && errors.Is(err, holds.ErrUnknown) {
					return errPending
				}
				return err
			}
			s.pending = false // only this goroutine uses it once the session has started
			by := s.r.TTL - h.Remaining()
			if !h.Ceiling.IsZero() {
				by = min(by, h.Ceiling.Sub(h.Deadline))
			}
			switch by = by.Truncate(time.Microsecond); {
			case h.State != holds.Held:
				return &holds.StateError{ID: h.ID, State: h.State, Hold: h}
			case h.Remaining() == 0:
				return errInGrace
			case by <= 0:
				return nil
			}
			all, err := book.Extend(ctx, tx, holds.Extend{Tenant: s.r.Tenant, IDs: []string{s.id},
				Holder: s.r.Holder, By: by, Note: s.r.Note})
			if err == nil {
				h = all[0]
			}
			return err
		})
	if err != nil {
		return s.lost(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold, s.deadline = h, began.Add(h.Remaining())
	if !h.Ceiling.IsZero() && !h.Deadline.Before(h.Ceiling) {
		return fmt.Errorf("%w: %q", holds.ErrCeiling, s.id)
	}
	return nil
}

// left is how long the hold lasts yet, at least.
func (s *session) left() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(s.deadline)
}

func (s *session) due() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hold.Due
}

// gave reports whether the hold has ended, as renewals found, because the transaction of SettleTx
// has committed.
func (s *session) gave(failed error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	lost, state := (*lostError)(nil), (*holds.StateError)(nil)
	return s.given && errors.As(failed, &lost) && errors.As(lost.Cause, &state) && state.State == holds.Captured
}

// settling reports whether a Settle or Cancel goes on, which may have ended the hold.
func (s *session) settling() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settles > 0
}

package metered

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/observe"
	"github.com/pgmetered/metered/tokens"
)

// Operation is the record of a command that committed, or was refused.
type Operation struct {
	// Tenant is the command's tenant.
	Tenant string `json:"tenant,omitempty"`

	// ID is the command's id, unique within Tenant.
	ID string `json:"id"`

	// Name is the command's name.
	Name string `json:"name,omitempty"`

	// Result is what its function returned, as JSON. It is null for a refusal.
	Result json.RawMessage `json:"result"`

	// Receipt has the charges, without standings.
	Receipt budget.Receipt `json:"receipt"`

	// Holds are the command's holds as of At.
	Holds []holds.Hold `json:"holds,omitempty"`

	// At is the time of completion.
	At time.Time `json:"at"`

	// IssuedAt is the time of the id. It is zero if the id had none.
	IssuedAt time.Time `json:"issued_at,omitzero"`

	// Refusal is the recorded refusal. It is nil if the command committed.
	Refusal error `json:"-"`

	// Code is the stable code of Refusal. It is "" if the command committed.
	Code string `json:"code,omitempty"`

	// Jobs are the first 1,000 jobs of Tx.Enqueue.
	Jobs []int64 `json:"jobs,omitempty"`
}

const lookupSQL = `
select result, scopes, amounts, seqs, ats, holds, at, issued_at, refusal, coalesce(name, ''), jobs
from metered.operations
where tenant = $1 and id = $2`

// Lookup returns the record of an operation, or ErrUnknownOperation. A record with EarlyRelease may
// not be durable yet.
func (c *Client) Lookup(ctx context.Context, db budget.Querier, tenant, id string) (Operation, error) {
	if err := cmp.Or(c.made(), notNil("db", db)); err != nil {
		return Operation{}, err
	}
	if err := checkID(tenant, id); err != nil {
		return Operation{}, err
	}
	var at schema.DB = c.pool
	if own, ok := db.(schema.DB); ok {
		at = own
	}
	if err := c.check.Usable(ctx, at); err != nil {
		return Operation{}, err
	}
	var rec command.Record
	var issued *time.Time
	op := Operation{Tenant: tenant, ID: id}
	look := func(ctx context.Context, db budget.Querier) error {
		err := answer.QueryRow(ctx, db, c.sql.lookup, tenant, id).
			Scan(&rec.Result, &rec.Scopes, &rec.Amounts, &rec.Seqs, &rec.Ats, &rec.Holds, &rec.At,
				&issued, &rec.Refusal, &op.Name, &op.Jobs)
		if errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("%w: %q of tenant %q", ErrUnknownOperation, id, tenant)
		}
		return fault.Failed("metered", "look up", err)
	}
	err := look(ctx, db)
	if errors.Is(err, ErrUnknownOperation) {
		err = c.here(ctx, err, look)
	}
	if err != nil {
		return Operation{}, err
	}
	op.Result, op.At = rec.Result, rec.At
	if op.Receipt, op.Holds, err = recorded(rec); err != nil {
		return Operation{}, err
	}
	if issued != nil {
		op.IssuedAt = *issued
	}
	if rec.Refusal != nil {
		op.Result, op.Refusal = nil, refusalOf(rec.Refusal)
		op.Code = Code(op.Refusal)
	}
	return op, nil
}

// drawnPrefix begins a charge with UpTo or Lots among the holds of a record: charge_lots of the
// schema writes it, and draw, which builds of 0.1.0 call. These take both for draws.
const drawnPrefix = `{"drawn"`

// recorded has the charges and holds of an operation's record.
func recorded(rec command.Record) (receipt budget.Receipt, all []holds.Hold, err error) {
	for i, scope := range rec.Scopes {
		receipt.Entries = append(receipt.Entries,
			budget.Posted{Scope: scope, Amount: rec.Amounts[i], Seq: rec.Seqs[i], At: rec.Ats[i]})
	}
	for _, raw := range rec.Holds {
		if strings.HasPrefix(raw, drawnPrefix) {
			var one struct {
				Drawn struct {
					Wallet string
					budget.Posted
				}
			}
			if err := json.Unmarshal([]byte(raw), &one); err != nil {
				return budget.Receipt{}, nil, fmt.Errorf("metered: a charge on record: %w", err)
			}
			p := one.Drawn.Posted
			p.Scope, p.At = one.Drawn.Wallet, p.At.UTC()
			receipt.Entries = append(receipt.Entries, p)
			continue
		}
		h, err := inHolds.Decode([]byte(raw))
		if err != nil {
			return budget.Receipt{}, nil, err
		}
		all = append(all, h)
	}
	return receipt, all, nil
}

// refusal is an error that fault.Refused reports, as it is recorded. One field has its type.
type refusal struct {
	Code          string                     `json:"code"`
	Text          string                     `json:"text"`
	Attempts      bool                       `json:"attempts,omitempty"` // by a sticky charge
	Exceeded      *budget.ExceededError      `json:"exceeded,omitempty"`
	Scopes        *budget.ScopeError         `json:"scopes,omitempty"`
	RefundExceeds *budget.RefundExceedsError `json:"refund_exceeds,omitempty"`
	Token         string                     `json:"token,omitempty"`
	Unknown       string                     `json:"unknown,omitempty"` // "holder" for another's hold
	Taken         *holds.TakenError          `json:"taken,omitempty"`
	State         *holds.StateError          `json:"state,omitempty"`
	Excess        *holds.ExcessError         `json:"excess,omitempty"`
}

// refusalJSON is a refusal as it is recorded.
func refusalJSON(err error) string {
	r := refusal{Code: fault.Code(err), Text: err.Error(), Attempts: errors.Is(err, ErrTooManyAttempts)}
	var token *tokens.InvalidError
	switch {
	case errors.As(err, &r.Exceeded), errors.As(err, &r.Scopes), errors.As(err, &r.RefundExceeds),
		errors.As(err, &r.Taken), errors.As(err, &r.State),
		errors.As(err, &r.Excess):
	case errors.As(err, &token):
		r.Token = token.Reason()
	case holds.IsOthers(err):
		r.Unknown = "holder"
	case errors.Is(err, holds.ErrUnknown):
		r.Unknown = "unknown"
	}
	if r.Taken != nil { // a repeated call may not learn the holder: that is for a call with Claim.Reveal
		taken := *r.Taken
		taken.By, r.Taken = nil, &taken
	}
	b, _ := json.Marshal(r) // of plain fields: never fails
	return string(b)
}

// refusalOf is the error that refusalJSON was given.
func refusalOf(raw []byte) error {
	var r refusal
	if err := json.Unmarshal(raw, &r); err != nil {
		return fmt.Errorf("metered: read a refusal: %w", err)
	}
	err := r.err()
	if r.Attempts {
		return fmt.Errorf("%w: %w", ErrTooManyAttempts, err)
	}
	return err
}

func (r *refusal) err() error {
	switch {
	case r.Exceeded != nil:
		return r.Exceeded
	case r.Scopes != nil:
		return r.Scopes
	case r.RefundExceeds != nil:
		return r.RefundExceeds
	case r.Taken != nil:
		return r.Taken
	case r.State != nil:
		return r.State
	case r.Excess != nil:
		return r.Excess
	case r.Token != "":
		return inTokens.Refuse(r.Token)
	case r.Unknown != "":
		return inHolds.Unknown(r.Unknown == "holder")
	}
	return fault.New(r.Code, r.Text) // which errors.Is finds by its code
}

// Resume returns a session of an open operation, from any process: to settle or cancel it where its
// result arrives, or after its process has died. ID and Tenant name it. Its fingerprint and,
// without Lines, its lines are those of Open. TTL, Grace, Note, Isolation and the next two are for
// this process, a Holder must be that of Open, and Name is for the record.
//
// Both sessions renew the hold, and one ends it. Then the other's Settle is a repetition, its
// Cancel is ErrLost, and its context ends at its next renewal. An operation on record is a
// Finished session, or budget.ErrConflict where its hold has another Holder. A recorded refusal (of a
// command with RecordRefusal) is the error. Without an open session, it is
// ErrLost.
func Resume[R any](ctx context.Context, c *Client, r Reservation) (*Session[R], error) {
	if err := c.made(); err != nil {
		return nil, err
	}
	if c.engine.Inside(ctx) {
		return nil, command.ErrNested
	}
	s, err := c.resume(ctx, r)
	if err == nil {
		s.start(ctx)
		s.tell(sessionResumed, false)
		return &Session[R]{s: s}, nil
	}
	if !errors.Is(err, holds.ErrUnknown) {
		return nil, err
	}
	op, lookErr := c.Lookup(ctx, c.pool, r.Tenant, r.ID)
	if errors.Is(lookErr, ErrUnknownOperation) {
		return nil, &lostError{ID: r.ID, Cause: err}
	} else if lookErr != nil {
		return nil, lookErr
	}
	if err := r.recorded(op); err != nil {
		return nil, err
	}
	out := Outcome[R]{Raw: op.Result, Replayed: true, Receipt: op.Receipt, Holds: op.Holds,
		At: op.At}
	if err := json.Unmarshal(op.Result, &out.Result); err != nil {
		return nil, fmt.Errorf("metered: read the result of operation %q: %w", r.ID, err)
	}
	return finished(ctx, s, out), nil
}

// recorded is nil if an operation on record is the answer to a reservation that names it by its id.
// The first hold of a session's record is that of the session. A Holder is compared as in a
// repetition of Open. An empty one is any, as in holds.Book.Get.
func (r *Reservation) recorded(op Operation) error {
	if r.Holder != "" && (len(op.Holds) == 0 || op.Holds[0].Holder != r.Holder) {
		return fmt.Errorf("%w: operation %q of tenant %q is not one of holder %q", command.ErrConflict,
			r.ID, r.Tenant, r.Holder)
	}
	return op.Refusal
}

// resume finds the open hold of an operation. The session is there on holds.ErrUnknown, too.
func (c *Client) resume(ctx context.Context, r Reservation) (_ *session, err error) {
	ctx, span := c.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "metered.resume"})
	defer func() { span.End(err) }()
	r.TTL = cmp.Or(r.TTL, defaultSessionTTL)
	r.Grace = cmp.Or(r.Grace, (r.TTL / 4).Truncate(time.Microsecond))
	s := &session{client: c, r: r}
	if _, err := c.prepare(s.command(nil), nil); err != nil {
		return nil, renamed(err, "Command", "Reservation")
	}
	if err := c.check.Usable(ctx, c.pool); err != nil {
		return nil, err
	}
	began := time.Now()
	find := func(ctx context.Context, db budget.Querier) (err error) {
		s.hold, s.fingerprint, err = inHolds.OfSession(ctx, c.Holds, db, r.Tenant, r.ID, r.Holder)
		return err
	}
	if err = find(ctx, c.pool); errors.Is(err, holds.ErrUnknown) {
		err = c.here(ctx, err, find)
	}
	if err != nil {
		return s, err
	}
	if len(r.Lines) == 0 {
		for _, l := range s.hold.Lines {
			s.r.Lines = append(s.r.Lines, holds.Line{Scope: l.Scope, Amount: l.Amount})
		}
	}
	s.id, s.deadline = s.hold.ID, began.Add(s.hold.Remaining())
	return s, nil
}

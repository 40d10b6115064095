package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Locks are the locks of a call. Their order is: its scopes and those of its holds, the ids of
// holds that it places, the rows of its holds and of due holds in scopes that it may charge.
type Locks struct {
	Scopes []string // that it may charge
	Keys   []int64  // of the locks of scopes. None for a capture, whose scopes are its hold's
	IDKeys []int64  // of the locks of the ids that it places
	Sums   []string // scopes that it charges without limits: locked unless they have tallies
	Holds  *HoldIDs // that it captures, releases, extends or refunds
}

// Sending says how a call is sent.
type Sending struct {
	WaitMS            int32  // the longest wait for its locks
	Tenant, Operation string // of its command, both empty for none
	Raising           bool   // a refusal is an error of Postgres, and not a row that leaves the transaction usable
	Telling           bool   // thresholds are reported. Otherwise a crossing is ErrCrossing
}

// Origin encodes the sender, with a note as JSON.
func (s Sending) Origin(note string) string {
	return Origin{Tenant: s.Tenant, Operation: s.Operation, Note: note}.String()
}

// Call is a validated call whose answer is an R. It has copies of its arguments.
type Call[R any] struct {
	SQL   string
	Locks Locks
	Args  func(Sending) []any
	Scan  func(pgx.Row) (R, error) // with the errors of the call

	// WholeSQL does the call and all else of a command that has no more to do. Its arguments are Args,
	// and then those of the command. It is empty for most calls.
	WholeSQL string

	Queries []*Query // to run under the locks, before Args

	Placing *Placing                               // of a call that places a hold
	Kind    string                                 // of a hold's call
	Tell    func(context.Context, pgx.Tx, R) error // calls subscribers, nil without any
	Cross   func(context.Context, pgx.Tx) error    // reports the thresholds that the last answer crossed, nil without any
}

// Placing is the further part of a placement.
type Placing struct {
	ID       string // of the hold
	Queries  []*Query
	Identity []byte // is equal in placements that are the same, without a generated id
	LookSQL  string // asks, without a lock, whether it would be refused
	LookArgs func() []any
	// Looked reads the answer.
	Looked func(pgx.Row) (refusal, err error)
}

// Parking are the charges of a job that waits until they fit.
type Parking struct {
	Charging
	Hold    string // a metered.new_hold, whose id the job gives
	Channel any    // of the hold's transitions, nil for none
}

// Opening is the further part of a placement that opens a session.
type Opening struct {
	Operation   string                                        // its id
	Command     func() string                                 // a metered.new_command
	Plain       func() []any                                  // the first arguments of open_session_plain
	Fingerprint func(placing []byte) []byte                   // of the session, from its Placing.Identity
	Refused     func(status string, at, due *time.Time) error // maps answers that open_session has beyond place
}

// Answering turns what the server says about charges into what their caller is told.
type Answering interface {
	// Refused is the error of a refusal that came as a column.
	Refused(refusal []byte) error
	// Failed maps an error of Postgres, such as a raised refusal (MT001).
	Failed(error) error
	// Cross tells of the thresholds that were crossed, which came as JSON.
	Cross(ctx context.Context, tx pgx.Tx, crossed []byte) error
}

// Charging are validated charges, whoever makes them.
type Charging struct {
	Answering
	Charges   []Charge // one for each distinct scope
	Queries   []*Query // to run under the locks, before Charges are sent
	Locks     Locks
	Tolerance pgtype.Interval
	Standing  bool              // the receipt has the standing of each limit
	Spans     *Spans            // the periods that the server told of, nil for none
	Closed    func(lease int64) // is called with a lease that cannot be spent from, nil without leases

	sent span // the period of the limit that was sent the short way
}

// Leased reports whether some of the charges are spent from leases.
func (c *Charging) Leased() bool {
	return c != nil && slices.ContainsFunc(c.Charges, func(x Charge) bool { return x.Lease != nil })
}

// SummedLocks are Locks where the charges are sent as Summed: those without limits need no lock of
// a scope that has tallies.
func (c *Charging) SummedLocks() Locks {
	locks := c.Locks
	for i := range c.Charges {
		if c.Charges[i].sum() {
			locks.Sums = append(locks.Sums, c.Charges[i].Scope)
		}
	}
	if locks.Sums == nil {
		return locks
	}
	locks.Keys, locks.Scopes = nil, nil
	for i := range c.Charges {
		if x := &c.Charges[i]; x.Lease == nil && !x.sum() {
			locks.Keys, locks.Scopes = append(locks.Keys, x.Key), append(locks.Scopes, x.Scope)
		}
	}
	locks.Keys = inOrder(locks.Keys)
	return locks
}

// Receipts makes the receipts of charges, each an R.
type Receipts[R any] interface {
	// Scan reads the row of charge, with the errors of Ledger.Charge.
	Scan(pgx.Row) (R, error)
	Receipt(Answer) (R, error)
	// Crossed is a receipt of crossings alone.
	Crossed(crossed []byte) (R, error)
}

// ChargeCall is a validated call of charges, whose receipt is an R.
type ChargeCall[R any] struct {
	Charging
	Receipts[R]
}

// Answer is the entries by charge and the usage by limit, or else the refusal as JSON. A check has
// no Seqs and Ats.
type Answer struct {
	Amount     int64 // of each entry, if it is not that of its charge
	Seqs       []int64
	Ats        []time.Time
	Used, Held []int64
	Refused    []byte
	Periods    Periods
	Crossed    []byte // JSON: the thresholds that were crossed
}

// Periods are the start and the end of each limit's period, for those that have one.
type Periods []time.Time

// Next takes the next one, in UTC.
func (p *Periods) Next() (start, end time.Time) {
	if len(*p) < 2 {
		return start, end // of an answer without standings
	}
	start, end = (*p)[0].UTC(), (*p)[1].UTC()
	*p = (*p)[2:]
	return start, end
}

// TokenRow is a row of consume_token or inspect_token, with TokenColumns. Nulls are accepted.
type TokenRow struct {
	Status                          *string
	Payload                         []byte
	UsesLeft                        *int32
	MintedAt, ExpiresAt, ConsumedAt *time.Time
}

// TokenColumns are the columns of consume_token and inspect_token.
const TokenColumns = `status, payload, uses_left, minted_at, expires_at, consumed_at`

// Dest are the destinations of TokenColumns.
func (r *TokenRow) Dest() []any {
	return []any{&r.Status, &r.Payload, &r.UsesLeft, &r.MintedAt, &r.ExpiresAt, &r.ConsumedAt}
}

// Package ledger is the wire form of calls of the schema's functions: a Go type for each composite
// type of internal/schema/sql/types.sql, and its text.
package ledger

import (
	"fmt"
	"slices"
	"time"
)

// Limit is metered.charge_limit.
type Limit struct {
	Max    int64
	Window time.Duration // 0 for the lifetime
	Period Period        // in place of a window. The zero value is none

	Thresholds string // each in a line: level, rearm, key; "" for none
	TellAt     *int64 // the lowest of them, nil without any
	Spent      bool   // some are on spending alone. Not sent
	Telling    bool   // the caller tells of those that are crossed
}

// Period is metered.period.
type Period struct {
	Every  string    // an interval; "" for no period
	Anchor time.Time // the zero time for none
	Zone   string    // "" for a fixed length
}

// IsZero reports whether it is no period.
func (p Period) IsZero() bool { return p.Every == "" }

// String is the period as text.
func (p Period) String() string {
	anchor := ""
	if !p.Anchor.IsZero() {
		anchor = moment(&p.Anchor)
	}
	return composite(text(p.Every), anchor, textOrNull(p.Zone))
}

// AllPeriods is an array of metered.period, with a null for each that is none, or null if all are.
func AllPeriods(of []Period) any {
	if !slices.ContainsFunc(of, func(p Period) bool { return !p.IsZero() }) {
		return nil
	}
	rows := make([]string, len(of))
	for i, p := range of {
		if rows[i] = composite("", "", ""); !p.IsZero() {
			rows[i] = p.String()
		}
	}
	return array(rows)
}

// Every is a length as Period.Every.
func Every(d time.Duration) string { return interval(d) }

// Charge is metered.new_charge: an amount of a scope, of which Held is to be held.
type Charge struct {
	Scope        string
	Key          int64
	Amount, Held int64
	Limits       []Limit
	Note         string // JSON, or "" for none
	Use          string // of Note
	MustExist    bool   // the scope, in the registry
	Lease        *Slice // the lease that it is spent from, nil for the chain
}

// ClosedError says that a lease cannot be spent from: it is closed, or the range was spent. Nothing
// was written.
type ClosedError struct {
	Lease int64
	Cause error // of Postgres, where it was raised, else nil
}

func (e *ClosedError) Error() string { return fmt.Sprintf("budget: lease %d is closed", e.Lease) }

// Unwrap returns the cause.
func (e *ClosedError) Unwrap() error { return e.Cause }

// LeaseTerms is metered.lease_terms.
type LeaseTerms struct {
	Mode, Owner string
	Least       int64
	Share       int
	TTL         time.Duration
	Child       string // "" for none
}

// String is the terms as text.
func (t LeaseTerms) String() string {
	return composite(t.Mode, text(t.Owner), number(t.Least), number(int64(t.Share)), interval(t.TTL), textOrNull(t.Child))
}

// Slice are the units of a lease from Offset on.
type Slice struct {
	No, Fence, Offset int64
}

// Limits is an array of metered.charge_limit.
func Limits(of []Limit) string { return limits(of) }

func limits(of []Limit) string {
	rows := make([]string, len(of))
	for i, l := range of {
		rows[i] = l.String()
	}
	return array(rows)
}

// String is the limit as text.
func (l Limit) String() string {
	window, period, tellAt, thresholds, telling := interval(l.Window), "", "", "", ""
	if !l.Period.IsZero() {
		window, period = "", text(l.Period.String())
	}
	if l.Thresholds != "" {
		tellAt, thresholds, telling = numberOrNull(l.TellAt), text(l.Thresholds), boolean(l.Telling)
	}
	return composite(number(l.Max), window, period, tellAt, thresholds, telling)
}

// Tells reports whether some limit of charges has thresholds.
func Tells(of []Charge) bool {
	return slices.ContainsFunc(of, func(c Charge) bool { return c.Lease == nil && tells(c.Limits) })
}

func tells(of []Limit) bool {
	return slices.ContainsFunc(of, func(l Limit) bool { return l.Thresholds != "" })
}

// Silent are the charges without thresholds: the next call that carries them reports what is
// reached.
func Silent(of []Charge) []Charge {
	if !Tells(of) {
		return of
	}
	of = slices.Clone(of)
	for i := range of {
		of[i].Limits = silent(of[i].Limits)
	}
	return of
}

func silent(of []Limit) []Limit {
	of = slices.Clone(of)
	for i := range of {
		of[i].Thresholds, of[i].TellAt, of[i].Telling = "", nil, false
	}
	return of
}

// Telling are the charges with their thresholds reported, if telling.
func Telling(of []Charge, telling bool) []Charge {
	if !telling || !Tells(of) {
		return of
	}
	of = slices.Clone(of)
	for i := range of {
		of[i].Limits = told(of[i].Limits)
	}
	return of
}

// TellingUsed is Telling for the units of a capture.
func TellingUsed(of []Used, telling bool) []Used {
	if !telling {
		return of
	}
	of = slices.Clone(of)
	for i := range of {
		of[i].Limits = told(of[i].Limits)
	}
	return of
}

func told(limits []Limit) []Limit {
	limits = slices.Clone(limits)
	for i := range limits {
		limits[i].Telling = true
	}
	return limits
}

// Charges is an array of metered.new_charge.
func Charges(of []Charge) string { return charges(of, false) }

// Summed is Charges for the calls that make each of them on its own: charges without limits may be
// written as tallies (tallies.sql).
func Summed(of []Charge) string { return charges(of, true) }

// sum reports whether a charge may be written as a tally: nothing refuses it, and it holds nothing.
func (c *Charge) sum() bool {
	return len(c.Limits) == 0 && c.Held == 0 && !c.MustExist && c.Use == "" && c.Lease == nil
}

func charges(of []Charge, summed bool) string {
	rows := make([]string, len(of))
	for i, c := range of {
		exist := ""
		if c.MustExist {
			exist = boolean(true)
		}
		if s := c.Lease; s != nil {
			rows[i] = composite(text(c.Scope), number(s.Fence), number(c.Amount), number(0), "{}", textOrNull(c.Note), "", number(s.No), number(s.Offset))
			continue
		}
		sent := text(limits(c.Limits))
		if summed && c.sum() {
			sent = "" // null
		}
		rows[i] = composite(text(c.Scope), number(c.Key), number(c.Amount), number(c.Held), sent, textOrNull(c.Note), exist, "", "")
	}
	return array(rows)
}

// Event is metered.new_event.
type Event struct {
	Tenant, ID           string
	Key                  int64 // of the lock of the id
	Fingerprint          []byte
	IssuedAt, OccurredAt *time.Time
}

// String is the event as text.
func (e *Event) String() string {
	return composite(text(e.Tenant), text(e.ID), number(e.Key), bytes(e.Fingerprint), moment(e.IssuedAt), moment(e.OccurredAt))
}

// Events is an array of metered.new_event, with a null for each nil, or null if all are nil.
func Events(of []*Event) any {
	if !slices.ContainsFunc(of, func(e *Event) bool { return e != nil }) {
		return nil
	}
	rows := make([]string, len(of))
	for i, e := range of {
		if rows[i] = composite("", "", "", "", "", ""); e != nil {
			rows[i] = e.String()
		}
	}
	return array(rows)
}

// Origin is metered.origin: the command, if it is one, and a note as JSON.
type Origin struct{ Tenant, Operation, Note string }

// String is the origin as text.
func (o Origin) String() string {
	if o.Operation == "" {
		return composite("", "", textOrNull(o.Note))
	}
	return composite(text(o.Tenant), text(o.Operation), textOrNull(o.Note))
}

// HoldIDs is metered.hold_ids: holds of a tenant, and their required holder ("" for any).
type HoldIDs struct {
	Tenant, Holder string
	IDs            []string
	Issued         []*time.Time // the times that the ids carry
}

// String is the ids as text.
func (h HoldIDs) String() string {
	issued := "{"
	for i, t := range h.Issued {
		if i > 0 {
			issued += ","
		}
		if t == nil {
			issued += "infinity" // never retired, as null: with array_nulls off that is a text
		} else {
			issued += `"` + timestamp(*t) + `"`
		}
	}
	return composite(text(h.Tenant), text(array(h.IDs)), text(issued+"}"), text(h.Holder))
}

// AllHoldIDs is an array of metered.hold_ids.
func AllHoldIDs(of []HoldIDs) string {
	rows := make([]string, len(of))
	for i, h := range of {
		rows[i] = h.String()
	}
	return array(rows)
}

// NewHold is metered.new_hold.
type NewHold struct {
	Tenant, ID    string
	Chosen        bool // the caller chose ID
	Key           int64
	Holder, Claim string
	Fingerprint   []byte
	IssuedAt      *time.Time
	TTL, Grace    time.Duration
	Lifetime      time.Duration // 0 for any
	Metadata      string        // JSON, or "" for none
	Minimum       []Used        // captured when it expires
	Fewest        int64         // units of each line, of a hold up to so much. 0 for one of all units
}

// String is the hold as text.
func (h NewHold) String() string {
	key := ""
	if h.Chosen {
		key = number(h.Key)
	}
	lifetime := ""
	if h.Lifetime > 0 {
		lifetime = interval(h.Lifetime)
	}
	minimum, least := "", h.Minimum
	if h.Fewest > 0 {
		least = append(slices.Clip(least), Used{Amount: h.Fewest})
	}
	if least != nil {
		minimum = text(allUsed(least))
	}
	return composite(text(h.Tenant), text(h.ID), boolean(h.Chosen), key, text(h.Holder), textOrNull(h.Claim), bytes(h.Fingerprint),
		moment(h.IssuedAt), interval(h.TTL), interval(h.Grace), lifetime, textOrNull(h.Metadata), minimum)
}

// UnknownUse is the use of a limit that refuses nothing, where it reaches purged entries.
const UnknownUse = -1 << 62

// Used is metered.used_units: units of a scope that a capture takes or a refund gives back.
type Used struct {
	Scope  string
	Amount int64
	Whole  bool // in place of Amount: all that is held
	Limits []Limit
}

// AllUsed is an array of metered.used_units. Nil is null, for all held units.
func AllUsed(of []Used) any {
	if of == nil {
		return nil
	}
	return allUsed(of)
}

func allUsed(of []Used) string {
	rows := make([]string, len(of))
	for i, u := range of {
		amount := number(u.Amount)
		if u.Whole {
			amount = ""
		}
		rows[i] = composite(text(u.Scope), amount, text(limits(u.Limits)))
	}
	return array(rows)
}

// Capture is metered.capture_terms.
type Capture struct {
	Closing bool
	Policy  string // refuse, fit or allow
	Entity  string
}

// String is the terms as text.
func (c Capture) String() string {
	return composite(boolean(c.Closing), text(c.Policy), textOrNull(c.Entity))
}

// Command is metered.new_command.
type Command struct {
	Tenant, ID string
	Key        int64
	IssuedAt   *time.Time
	MaxFuture  time.Duration
	TimeoutMS  *int32 // 0 leaves the session's timeouts, nil all its settings
	Marker     string
	Standing   bool // the receipt has the standing of each limit
	Leased     bool // some of its charges are spent from leases
	Name       string
	Jobs       []int64 // made by the command, for the record
}

// String is the command as text.
func (c Command) String() string {
	timeout := ""
	if c.TimeoutMS != nil {
		timeout = number(int64(*c.TimeoutMS))
	}
	return composite(text(c.Tenant), text(c.ID), number(c.Key), moment(c.IssuedAt), interval(c.MaxFuture), timeout, text(c.Marker),
		boolean(c.Standing), boolean(c.Leased), textOrNull(c.Name), numbersOrNull(c.Jobs))
}

// PresentedToken is metered.presented_token. Without a digest it is no token.
type PresentedToken struct {
	Digest           []byte
	Purpose, Subject string
}

// String is the token as text.
func (t PresentedToken) String() string {
	return composite(bytes(t.Digest), text(t.Purpose), text(t.Subject))
}

// NewToken is metered.new_token.
type NewToken struct {
	Digest           []byte
	Purpose, Subject string
	Payload          *string // JSON
	Uses             int
	TTL              time.Duration
}

// String is the token as text.
func (t NewToken) String() string {
	payload := ""
	if t.Payload != nil {
		payload = text(*t.Payload)
	}
	return composite(bytes(t.Digest), text(t.Purpose), text(t.Subject), payload, number(int64(t.Uses)), interval(t.TTL))
}

// NewTokens is an array of metered.new_token.
func NewTokens(of []NewToken) string {
	rows := make([]string, len(of))
	for i, t := range of {
		rows[i] = t.String()
	}
	return array(rows)
}

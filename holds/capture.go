package holds

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Over is the rule for a capture beyond the held units.
type Over string

const (
	// OverRefused refuses the capture with an *ExcessError.
	OverRefused Over = ""

	// OverIfFits charges all if the Line's limits admit the excess. Otherwise the capture is a
	// *budget.ExceededError.
	OverIfFits Over = "if fits"

	// OverUpTo charges as much of the excess as the Line's limits admit: see HeldLine.Captured.
	OverUpTo Over = "up to"

	// OverEvenly is OverUpTo, and cuts every Line by as many units as the one that is cut most. So
	// equal Lines stay equal.
	OverEvenly Over = "evenly"

	// OverAllowed charges all, since the cost was incurred.
	OverAllowed Over = "allowed"
)

// policies has the names that capture_holds in schema.sql knows.
var policies = map[Over]string{OverRefused: "refuse", OverIfFits: "fit", OverUpTo: "upto",
	OverEvenly: "even", OverAllowed: "allow"}

// fits reports whether limits judge the excess.
func (o Over) fits() bool { return o == OverIfFits || o == OverUpTo || o == OverEvenly }

// Capture names holds and their used units.
type Capture struct {
	// Tenant is the tenant of the holds.
	Tenant string

	// IDs are the holds to capture, from 1 to 100, all of them or none. Lines need a single one.
	IDs []string

	// Holder is who holds the units. A hold of another holder is ErrUnknown. Defaults to any
	// holder, unless Config.RequireHolder is set.
	Holder string

	// All captures all held units. Set All or Lines.
	All bool

	// Lines are the used units of one hold's scopes, 0 for others. Lines of a claim include its own
	// unit (of Key.Scope), unless Keep.
	//
	// With OverIfFits, OverUpTo and OverEvenly, a Line's Limits judge the excess. Otherwise, or in
	// Lines without Amount beside All, they only carry thresholds (docs/thresholds.md).
	Lines []Line
	// Keep leaves the rest held. It cannot capture a claim's own unit, which ends the hold.
	Keep bool

	// Over says what happens to a Line beyond the held units. Defaults to OverRefused.
	Over Over

	// Entity is the id of an order or the like, to find the hold by.
	Entity string

	// Note is stored with the transition and with the entries of its charges.
	Note budget.Note
}

const captureSQL = `
select refused, holds, crossed
from metered.capture_holds($1::metered.hold_ids, $2::metered.used_units[], $3::metered.capture_terms, $4::interval,
    $5::int, $6::metered.origin, $7::text, $8::bool)`

const capturePlainSQL = `
select metered.capture_holds_plain($1::text, $2::text, $3::timestamptz, $4::text, $5::text, $6::bigint, $7::text, $8::jsonb,
    $9::text, $10::text, $11::int, $12::text, $13::bool)`

const runCaptureSQL = `
select metered.run_capture_plain($1::text, $2::text, $3::timestamptz, $4::text, $5::text, $6::bigint, $7::text, $8::jsonb,
    $9::text, $10::text, $11::int, $12::text, $13::bool, $14::bigint, $15::timestamptz, $16::interval, $17::bytea, $18::bytea, $19::text)`

// Capture charges the used units and frees the rest, before Hold.Due.
//
// Errors: ErrUnknown, ErrRetired, *StateError, *ExcessError, *budget.ExceededError, an
// OnThreshold's, and after SQL a *budget.ArgumentError for Lines that do not fit the hold.
func (b *Book) Capture(ctx context.Context, tx pgx.Tx, c Capture) ([]Hold, error) {
	return do(ctx, tx, b, "holds.capture", (*Book).prepareCapture, c)
}

// prepareCapture validates a capture as Capture does, without any SQL.
func (b *Book) prepareCapture(c Capture) (*call, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	c.IDs, c.Lines = slices.Clone(c.IDs), slices.Clone(c.Lines) // the caller may use its own again
	for i, line := range c.Lines {
		c.Lines[i].Limits = slices.Clone(line.Limits)
	}
	if err := checkIDs(c.Tenant, c.Holder, c.IDs); err != nil {
		return nil, err
	}
	if err := checkText("Capture.Entity", c.Entity); err != nil {
		return nil, err
	}
	if err := cmp.Or(b.required("Capture.Holder", c.Holder), b.checkNote("Capture.Note", c.Note)); err != nil {
		return nil, err
	}
	policy, known := policies[c.Over]
	switch {
	case !known:
		return nil, invalid("Capture.Over", "%q is not a policy", c.Over)
	case len(c.Lines) == 0 && !c.All:
		return nil, invalid("Capture.Lines",
			"are none: set All to capture all that is held; if nothing was used, release it")
	case c.All && slices.ContainsFunc(c.Lines, func(l Line) bool { return l.Amount != 0 }):
		return nil, invalid("Capture.Lines", "have an Amount, and All captures all that is held")
	case len(c.Lines) > 0 && len(c.IDs) > 1:
		return nil, invalid("Capture.Lines", "are for one hold, and IDs are %d", len(c.IDs))
	case c.All && c.Keep:
		return nil, invalid("Capture.Keep", "is not for All: nothing remains to be kept")
	case c.All && c.Over != OverRefused:
		return nil, invalid("Capture.Over", "is not for All: no more is captured than is held")
	}
	used, tolerance, err := b.used(c)
	if err != nil {
		return nil, err
	}
	kind := EventCaptured
	if c.Keep {
		kind = EventCapturedPart
	}
	ids := holdIDs(c.Tenant, c.Holder, c.IDs)
	locks := ledger.Locks{Holds: &ids}
	if c.Over != OverRefused {
		for _, u := range used { // their keys are the hold's
			locks.Scopes = append(locks.Scopes, u.Scope)
		}
	}
	terms := ledger.Capture{Closing: !c.Keep, Policy: policy, Entity: c.Entity}
	var crossed []byte
	plain := len(c.IDs) == 1 && !c.Keep && c.Over == OverRefused &&
		(len(used) == 0 || len(used) == 1 && !c.All && len(used[0].Limits) == 0)
	scan := scanner(plain, func(err error) error { return b.captureFailed(c, err) }, func(refusal []byte) error { return b.captureRefused(c, refusal) }, &crossed)
	call := &call{
		SQL: b.sql.capture, Locks: locks, Kind: string(kind), Tell: b.teller(kind, c.Note),
		Cross: func(ctx context.Context, tx pgx.Tx) error {
			priced, err := b.crossings(c, crossed)
			if priced == nil || err != nil {
				return err
			}
			return priced.Cross(ctx, tx, crossed)
		},
		Args: func(s ledger.Sending) []any {
			return []any{ids.String(), ledger.AllUsed(ledger.TellingUsed(used, s.Telling)),
				terms.String(), tolerance, s.WaitMS, s.Origin(inBudget.NoteJSON(c.Note)),
				b.channel(), s.Raising}
		},
		Scan: func(row pgx.Row) ([]Hold, error) {
			all, err := scan(row)
			if err != nil {
				return nil, err
			}
			priced, err := b.crossings(c, crossed)
			if priced == nil || err != nil {
				return all, err
			}
			r, err := priced.Crossed(crossed)
			all[0].Crossed = r.Crossed // of one hold: All of several has no limits
			return all, err
		},
	}
	if plain {
		call.SQL, call.WholeSQL = b.sql.capturePlain, b.sql.runCapture
		call.Args = func(s ledger.Sending) []any { return b.capturePlainArgs(c, used, s) }
	}
	return call, nil
}

// capturePlainArgs are the arguments of capture_holds_plain.
func (b *Book) capturePlainArgs(c Capture, used []ledger.Used, s ledger.Sending) []any {
	var scope, units, entity, note any
	if len(used) > 0 {
		scope, units = used[0].Scope, used[0].Amount
	}
	if c.Entity != "" {
		entity = c.Entity
	}
	if json := inBudget.NoteJSON(c.Note); json != "" {
		note = json
	}
	args := append(make([]any, 0, 19), c.Tenant, c.IDs[0], issuedAt(c.IDs[0]), c.Holder, scope, units, entity, note)
	return append(append(args, s.PlainOrigin()...), s.WaitMS, b.channel(), s.Raising)
}

// used converts the lines of a capture for its SQL function, nil for Capture.All.
func (b *Book) used(c Capture) (used []ledger.Used, tolerance any, err error) {
	tolerance = interval(0)
	for i, line := range c.Lines {
		if slices.ContainsFunc(used, func(u ledger.Used) bool { return u.Scope == line.Scope }) {
			return nil, nil, invalid(index("Capture.Lines", i, ".Scope"), "%q is there twice", line.Scope)
		}
		if line.AtLeast != 0 {
			return nil, nil, invalid(index("Capture.Lines", i, ".AtLeast"), "is for placing")
		}
		if line.Amount < 0 {
			return nil, nil, invalid(index("Capture.Lines", i, ".Amount"), "%d is negative", line.Amount)
		}
		// The budget's own checks. A capture may be of 0 units, a charge may not.
		priced, err := inBudget.Charges(b.ledger,
			budget.Charge{Scope: line.Scope, Amount: max(line.Amount, 1), Limits: line.Limits,
				Note: c.Note})
		if err != nil {
			return nil, nil, renamed(err, "Capture.Lines",
				func(int) string { return index("Capture.Lines", i, "") })
		}
		if err == nil && len(priced.Queries) > 0 {
			return nil, nil, invalid(index("Capture.Lines", i, ".Limits"),
				"have a MaxFrom, which is for placing and charging")
		}
		if c.Over.fits() && len(line.Limits) == 0 { // everything would fit
			return nil, nil, invalid(index("Capture.Lines", i, ".Limits"),
				"are none: OverIfFits, OverUpTo and OverEvenly need a limit to fit into")
		}
		limits := priced.Charges[0].Limits
		if c.Over == OverRefused || c.Over == OverAllowed { // they are for thresholds alone
			limits = slices.DeleteFunc(slices.Clone(limits),
				func(l ledger.Limit) bool {
					return !l.Spent &&
						(l.TellAt == nil || c.Over == OverRefused)
				})
		}
		used = append(used, ledger.Used{Scope: line.Scope, Amount: line.Amount, Whole: c.All, Limits: limits})
		tolerance = priced.Tolerance
	}
	return used, tolerance, nil
}

// captureFailed turns an error of Postgres into that of Capture.
func (b *Book) captureFailed(c Capture, err error) error {
	var pgErr *pgconn.PgError
	switch state := sqlstate.Of(err); {
	case state == sqlstate.HoldRefused && errors.As(err, &pgErr):
		return b.captureRefused(c, []byte(pgErr.Detail))
	case sqlstate.OfBudget(state):
		return inBudget.Failed("capture", err) // the budget's own words for it
	}
	return failed("capture", err)
}

// crossings decodes the thresholds that a capture crossed, from JSON. It returns nil for none.
func (b *Book) crossings(c Capture, crossed []byte) (*charging, error) {
	if len(crossed) == 0 {
		return nil, nil
	}
	charges := make([]budget.Charge, len(c.Lines))
	for i, line := range c.Lines {
		charges[i] = budget.Charge{Scope: line.Scope, Amount: max(line.Amount, 1),
			Limits: line.Limits, Note: c.Note}
	}
	return inBudget.Charges(b.ledger, charges...)
}

// captureRefused decodes why a capture was refused. Limits refuse only its excess.
func (b *Book) captureRefused(c Capture, answer []byte) error {
	var a struct {
		Status  string
		Refused json.RawMessage
		Scopes  []string
		Units   []int64
	}
	if err := json.Unmarshal(answer, &a); err != nil || a.Status != "refused" {
		return refused(answer)
	}
	charges := make([]budget.Charge, len(a.Scopes))
	for i, scope := range a.Scopes {
		at := slices.IndexFunc(c.Lines, func(l Line) bool { return l.Scope == scope })
		charges[i] = budget.Charge{Scope: scope, Amount: a.Units[i], Limits: c.Lines[at].Limits, Note: c.Note}
	}
	priced, err := inBudget.Charges(b.ledger, charges...)
	if err != nil {
		return err
	}
	return priced.Refused(a.Refused)
}

package holds

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// Line is an amount of one scope.
type Line struct {
	// Scope is the budget whose units are held: 1 to 255 bytes of UTF-8.
	Scope string

	// Amount is how many units are held, from 1 to 2^53. In a Capture it is from 0.
	Amount int64

	// Limits must all let the amount in.
	Limits []budget.Limit

	// MustExist refuses a scope that was not created, as in budget.Charge. It is not for a
	// Capture.
	MustExist bool

	// AtLeast, a part of Amount, is charged when the hold falls due, less captured units. Release
	// frees it. Not for a Capture.
	AtLeast int64
}

// Placement is a hold to place.
type Placement struct {
	// ID is unique within Tenant. A UUIDv7 is not placed again after a purge. Defaults to a new
	// UUIDv7.
	ID string

	// Tenant separates the ids of tenants, but not their scopes.
	Tenant string

	// Holder is who holds the units. Calls that name another holder do not find the hold.
	Holder string

	// Lines are the units to hold. Together with Charges they are 1 to 64 scopes.
	Lines []Line

	// Charges are spent at once, for good.
	Charges []budget.Charge

	// TTL is the time until the deadline, within Config's bounds, in whole microseconds. Required.
	TTL time.Duration

	// Grace is the time for a capture past the deadline, up to Config.MaxTTL, in whole
	// microseconds.
	Grace time.Duration

	// Metadata is any JSON of up to 64 KiB. It is stored with the hold.
	Metadata json.RawMessage

	// Note is stored with the transition and with the entries of the placement.
	Note budget.Note

	// UpTo holds equal units of all Lines, which have one Amount, each another scope: that, or else
	// the most that all limits admit, at least 1 and the greatest AtLeast. Charges stay whole.
	UpTo bool

	// claim is the scope of a claim, key its key, and reveal Claim.Reveal. Set by Claim.
	claim  string
	key    Key
	reveal bool

	opening *ledger.Opening // of a session (metered.Open)
}

const placeSQL = `
select status, placed_at, deadline, seqs, ats, refused, stored, crossed
from metered.place($1::metered.new_hold, $2::metered.new_charge[], $3::interval, $4::int, $5::metered.origin, $6::text, $7::bool, $8::bool)`

const placePlainSQL = `
select metered.place_plain($1::text, $2::text, $3::bigint, $4::text, $5::bytea, $6::timestamptz, $7::interval, $8::interval,
    $9::interval, $10::json, $11::text, $12::bigint, $13::bigint, $14::bigint, $15::interval, $16::timestamptz, $17::timestamptz,
    $18::jsonb, $19::text, $20::text, $21::text, $22::interval, $23::int, $24::text, $25::bool)`

const lookSQL = `
select status, at, deadline, refused, stored
from metered.look_place($1::metered.new_hold, $2::metered.new_charge[], $3::interval, $4::bool)`

// Place reserves Lines and makes Charges, in one round trip.
//
// A repeated request (same ID, tenant, holder, scopes, amounts and metadata) returns the first hold
// with Created = false, or a *StateError if it has ended.
//
// It locks the scopes, the ID if the caller chose it, and holds that are due. Errors:
// *budget.ExceededError, *budget.ScopeError, ErrConflict, ErrRetired, *StateError.
func (b *Book) Place(ctx context.Context, tx pgx.Tx, r Placement) (Hold, error) {
	return first(do(ctx, tx, b, "holds.place", (*Book).preparePlace, r))
}

// preparePlace validates a request as Place does, without any SQL.
func (b *Book) preparePlace(r Placement) (*call, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	chosen := r.ID != "" && r.claim == "" && r.opening == nil
	if r.ID == "" {
		r.ID = uuidv7.New()
	}
	if len(r.Lines) == 0 {
		return nil, invalid("Placement.Lines", "are none")
	}
	priced, err := b.check(&r)
	if err != nil {
		return nil, err
	}
	charges := priced.Charges
	hold := ledger.NewHold{
		Tenant: r.Tenant, ID: r.ID, Chosen: chosen, Holder: r.Holder, Claim: r.claim,
		Fingerprint: r.fingerprint(charges), IssuedAt: issuedAt(r.ID),
		TTL: r.TTL, Grace: r.Grace, Lifetime: b.lifetime(), Metadata: string(r.Metadata),
		Minimum: minima(r.Lines), Fewest: r.fewest(),
	}
	locks := priced.SummedLocks()
	sent := ledger.Summed
	if hold.Fewest > 0 {
		locks, sent = priced.Locks, ledger.Charges
	}
	if chosen {
		hold.Key = lockkey.Of("metered/hold/"+b.schema.String(), r.Tenant+"\x00"+r.ID)
		locks.IDKeys = []int64{hold.Key}
	}
	identity := append([]byte(r.Tenant+"\x00"), hold.Fingerprint...)
	if chosen {
		identity = append(identity, r.ID...)
	}
	var crossed []byte
	if r.opening != nil {
		hold.Fingerprint = r.opening.Fingerprint(identity)
	}
	c := &call{
		Cross: func(ctx context.Context, tx pgx.Tx) error { return priced.Cross(ctx, tx, crossed) },
		SQL:   b.sql.place, Locks: locks, Queries: priced.Queries, Kind: string(EventPlaced),
		Tell: b.teller(EventPlaced, r.Note),
		Placing: &ledger.Placing{
			ID: r.ID, Queries: priced.Queries, Identity: identity, LookSQL: b.sql.look,
			LookArgs: func() []any {
				return []any{hold.String(), ledger.Charges(fewest(charges, hold.Fewest)),
					priced.Tolerance, r.reveal}
			},
			Looked: func(row pgx.Row) (refusal, err error) { return looked(priced, r.key, row) },
		},
		Args: func(s ledger.Sending) []any {
			return []any{hold.String(), sent(ledger.Telling(charges, s.Telling)), priced.Tolerance,
				s.WaitMS, s.Origin(inBudget.NoteJSON(r.Note)), b.channel(), s.Raising, r.reveal}
		},
		Scan: func(row pgx.Row) ([]Hold, error) {
			var a ledger.Placed
			if err := row.Scan(&a.Status, &a.At, &a.Deadline, &a.Seqs, &a.Ats, &a.Refused,
				&a.Stored, &a.Crossed); err != nil {
				return nil, placeFailed(priced, r.key, err)
			}
			crossed = a.Crossed
			return b.placed(priced, r, a)
		},
	}
	if priced.PlainHold() && r.claim == "" && hold.Minimum == nil && hold.Fewest == 0 {
		c.SQL = b.sql.placePlain
		c.Args = func(s ledger.Sending) []any {
			return append(priced.PlainPlacing(hold, r.opening == nil, s), priced.Tolerance,
				s.WaitMS, b.channel(), s.Raising)
		}
		c.Scan = func(row pgx.Row) ([]Hold, error) {
			var answer []byte
			var a ledger.Placed
			if err := row.Scan(&answer); err != nil {
				return nil, placeFailed(priced, r.key, err)
			}
			if err := a.ScanPlain(answer, &priced.Charging, r.TTL); err != nil {
				return nil, placeFailed(priced, r.key, err)
			}
			crossed = a.Crossed
			return b.placed(priced, r, a)
		}
	}
	return c, nil
}

// check validates a request, and sets its defaults.
func (b *Book) check(r *Placement) (*charging, error) {
	if err := checkNames(r.Tenant, r.Holder, r.ID); err != nil {
		return nil, err
	}
	if err := b.required("Placement.Holder", r.Holder); err != nil {
		return nil, err
	}
	if r.TTL < b.cfg.MinTTL || r.TTL > b.cfg.MaxTTL {
		return nil, invalid("Placement.TTL",
			"%v is not from Config.MinTTL, %v, to Config.MaxTTL, %v", r.TTL, b.cfg.MinTTL,
			b.cfg.MaxTTL)
	}
	if r.Grace < 0 || r.Grace > b.cfg.MaxTTL {
		return nil, invalid("Placement.Grace", "%v is not from 0 to %v", r.Grace, b.cfg.MaxTTL)
	}
	if (r.TTL+r.Grace)%time.Microsecond != 0 || r.TTL%time.Microsecond != 0 {
		return nil, invalid("Placement.TTL", "and Grace: %v and %v are not whole microseconds", r.TTL, r.Grace)
	}
	if r.Metadata != nil {
		r.Metadata = bytes.Clone(bytes.TrimSpace(r.Metadata)) // as Get will return it. The caller may change its own
	}
	if string(r.Metadata) == "null" {
		r.Metadata = nil
	}
	if len(r.Metadata) > bounds.MaxMetadataBytes {
		return nil, invalid("Placement.Metadata", "is %d bytes, want at most %d", len(r.Metadata),
			bounds.MaxMetadataBytes)
	}
	if r.Metadata != nil && (!json.Valid(r.Metadata) || !utf8.Valid(r.Metadata)) {
		return nil, invalid("Placement.Metadata", "is not JSON")
	}
	if err := b.checkNote("Placement.Note", r.Note); err != nil {
		return nil, err
	}
	for i, l := range r.Lines {
		if l.AtLeast < 0 || l.AtLeast > max(l.Amount, 0) {
			field := index("Placement.Lines", i, ".AtLeast")
			if r.claim != "" {
				field = index("Claim.Lines", i-1, ".AtLeast")
			}
			return nil, invalid(field, "%d is not from 0 to the amount, %d", l.AtLeast, l.Amount)
		}
	}
	charges := make([]budget.Charge, 0, len(r.Lines)+len(r.Charges))
	for _, line := range r.Lines {
		charges = append(charges, budget.Charge{Scope: line.Scope, Amount: line.Amount,
			Limits: line.Limits, Note: r.Note, MustExist: line.MustExist})
	}
	for i, c := range r.Charges {
		if c.Note == (budget.Note{}) {
			c.Note = r.Note
		}
		if err := b.checkNote(index("Placement.Charges", i, ".Note"), c.Note); err != nil {
			return nil, err
		}
		charges = append(charges, c)
	}
	priced, err := inBudget.Charges(b.ledger, charges...)
	if err == nil && r.UpTo {
		if err := checkUpTo(r.Lines); err != nil {
			return nil, err
		}
	}
	if err == nil {
		for _, line := range r.Lines {
			i := slices.IndexFunc(priced.Charges, func(c ledger.Charge) bool { return c.Scope == line.Scope })
			priced.Charges[i].Held += line.Amount
		}
	}
	return priced, renamed(err, "Placement.Lines", func(i int) string {
		switch lines := len(r.Lines); {
		case i >= lines:
			return index("Placement.Charges", i-lines, "")
		case r.claim != "":
			return index("Claim.Lines", i-1, "")
		}
		return index("Placement.Lines", i, "")
	})
}

// looked reads the row of lookSQL.
func looked(priced *charging, key Key, row pgx.Row) (refusal, err error) {
	var status *string
	var at, deadline *time.Time
	var refused, by []byte
	if err := row.Scan(&status, &at, &deadline, &refused, &by); err != nil {
		return nil, placeFailed(priced, key, err)
	}
	if status == nil {
		return nil, nil
	}
	if *status == "refused" {
		return priced.Refused(refused), nil
	}
	return takenUntil(key, at, deadline, by), nil
}

// takenUntil is the refusal of a claim that is taken until its deadline, or for good without one.
func takenUntil(key Key, at, deadline *time.Time, by []byte) error {
	if deadline == nil {
		return taken(key, nil, by)
	}
	after := deadline.Sub(*at).Microseconds()
	return taken(key, &after, by)
}

// placeFailed turns an error of Postgres into that of Place.
func placeFailed(priced *charging, key Key, err error) error {
	if state := sqlstate.Of(err); state == sqlstate.Exceeded || sqlstate.OfBudget(state) {
		return priced.Failed(err) // the budget's own words for it
	}
	doing := "place"
	if key != (Key{}) {
		doing = "claim"
	}
	err = failed(doing, err)
	var taken *TakenError
	if errors.As(err, &taken) {
		taken.Key = key
	}
	return err
}

// placed is the hold of an answer, or the error of a refusal.
func (b *Book) placed(priced *charging, r Placement, a ledger.Placed) ([]Hold, error) {
	at, deadline, stored := a.At, a.Deadline, a.Stored
	switch a.Status {
	case "placed":
	case "refused":
		return nil, priced.Refused(a.Refused)
	case "taken":
		return nil, takenUntil(r.key, at, deadline, stored)
	case "same":
		var h Hold
		if err := h.decode(stored); err != nil {
			return nil, err
		}
		if h.State != Held {
			return []Hold{h}, &StateError{ID: h.ID, State: h.State, Hold: h}
		}
		return []Hold{h}, nil
	case "open":
		var h Hold
		err := h.decode(stored)
		return []Hold{h}, err
	default:
		if r.opening != nil {
			return nil, r.opening.Refused(a.Status, at, deadline)
		}
		answer, _ := json.Marshal(map[string]string{"status": a.Status, "id": r.ID})
		return nil, refused(answer)
	}
	h := Hold{
		Tenant: r.Tenant, ID: r.ID, Holder: r.Holder, State: Held, Version: 1, Created: true,
		PlacedAt: at.UTC(), Deadline: deadline.UTC(), Due: deadline.Add(r.Grace).UTC(), Now: at.UTC(),
		Lines: heldLines(priced.Charges, minima(r.Lines)), Metadata: r.Metadata,
	}
	if lifetime := b.lifetime(); lifetime > 0 {
		h.Ceiling = at.Add(lifetime).UTC()
	}
	if r.claim != "" {
		h.Claim = &r.key
	}
	if r.UpTo {
		var placed Hold
		if err := placed.decode(stored); err != nil {
			return nil, err
		}
		h.Lines = placed.Lines
	}
	for i, c := range priced.Charges {
		if rest := c.Amount - c.Held; rest > 0 {
			h.Charges = append(h.Charges,
				budget.Posted{Scope: c.Scope, Seq: a.Seqs[i], Amount: rest, At: a.Ats[i].UTC()})
		}
	}
	receipt, err := priced.Crossed(a.Crossed)
	h.Crossed = receipt.Crossed
	return []Hold{h}, err
}

// first is the only hold of a call on one.
func first(holds []Hold, err error) (Hold, error) {
	if len(holds) == 0 {
		return Hold{}, err
	}
	return holds[0], err
}

// minima are the lines' AtLeast by scope, nil without any.
func minima(lines []Line) (all []ledger.Used) {
	for _, l := range lines {
		i := slices.IndexFunc(all, func(u ledger.Used) bool { return u.Scope == l.Scope })
		switch {
		case l.AtLeast == 0:
		case i < 0:
			all = append(all, ledger.Used{Scope: l.Scope, Amount: l.AtLeast})
		default:
			all[i].Amount += l.AtLeast
		}
	}
	return all
}

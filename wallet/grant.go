package wallet

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
)

// Grant is a lot for a wallet.
type Grant struct {
	// Wallet is any scope, of 1 to 255 bytes. Its first grant makes it a wallet.
	Wallet string

	// Amount are the units of the lot, from 1 to 2^53.
	Amount int64

	// Ends is when the lot ends: At, After or EachPeriod, which makes a plan. It defaults to never.
	Ends Ends

	// Starts is when the lot begins, or when it was bought: After counts from it, and EachPeriod
	// begins with its period. It can be in the past, for a message that comes late, up to 24
	// periods of EachPeriod. It defaults to now.
	Starts time.Time

	// Roll makes units of a lot that ends go on in another one. It defaults to none.
	Roll *Roll

	// Category is what kind of credit it is, such as "paid" or "promotional", in up to 255 bytes.
	Category string

	// Priority decides which lot is drawn first: the one with the lowest. It is an int32. Defaults
	// to that of the Category in Config.Priorities.
	Priority *int

	// Reference names the grant within its wallet, in up to 255 bytes, and makes it idempotent
	// until a purge takes its lot. A second grant of the name is ErrConflict if any field but Note
	// differs.
	Reference string

	// Uses are up to 16 texts. The lot pays for draws, charges and holds whose Note.Use is one of
	// them, and for nothing else. Defaults to everything.
	Uses []string

	// LateRefunds is how long units last that are refunded after the lot's end: a new lot has them,
	// for up to 36,525 days from the refund on, or Forever, or not at all (Lapse). Defaults to
	// Config.LateRefunds.
	LateRefunds time.Duration

	// Note is stored with the entry of the grant.
	Note budget.Note
}

// Granted is a made lot.
type Granted struct {
	// Lot is the number of the lot. It is 0 if a Rollover found no unit.
	Lot int64 `json:"lot"`

	// Amount are the units of the lot.
	Amount int64 `json:"amount"`

	// Seq is the number of the entry that made the lot.
	Seq int64 `json:"seq"`

	// At is the time of that entry.
	At time.Time `json:"at,omitzero"`

	// Expires is the end of the lot. It is zero for never.
	Expires time.Time `json:"expires_at,omitzero"`

	// Replayed says that an earlier call made the lot.
	Replayed bool `json:"replayed,omitempty"`

	// Revoked are the units that Revoke has taken back from the lot of a grant that was made before,
	// and from those in which it went on. The grant brings them no second time: Reinstate does.
	Revoked int64 `json:"revoked,omitempty"`
	// RenewalsEnded reports that no lot of such a grant comes any more, because a Revoke ended its
	// renewals.
	RenewalsEnded bool `json:"renewals_ended,omitempty"`
}

const grantSQL = `
select coalesce(status, ''), coalesce(no, 0), coalesce(amount, 0), coalesce(seq, 0), coalesce(at, 'epoch'), expires_at, refused, coalesce(revoked, 0), coalesce(renewals_ended, false)
from metered.plan_lot($1::text, $2::bigint, $3::metered.new_lot, $4::metered.lot_plan, $5::timestamptz, $6::bool, $7::int, $8::metered.origin)`

// Grant adds a lot to a wallet, which pays an overdraft back at once. The same grant again answers
// with the first lot, and says what was revoked of it since. Refusals: ErrConflict, ErrExpired,
// *budget.ScopeError.
func (b *Book) Grant(ctx context.Context, tx pgx.Tx, g Grant) (granted Granted, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx)); err != nil {
		return Granted{}, err
	}
	lot, err := b.lot(g)
	if err != nil {
		return Granted{}, err
	}
	plan, err := g.plan()
	if err != nil {
		return Granted{}, err
	}
	call, err := inBudget.Charges(b.ledger, budget.Charge{Scope: g.Wallet, Amount: g.Amount, Note: g.Note})
	if err != nil {
		return Granted{}, err
	}
	ctx, span := b.begin(ctx, "wallet.grant")
	defer func() { span.End(err) }()
	c := call.Charges[0]
	var status string
	var expires *time.Time
	var refused []byte
	var starts *time.Time
	if !g.Starts.IsZero() {
		starts = &g.Starts
	}
	err = answer.QueryRow(ctx, tx, b.sql.grant, g.Wallet, c.Key, lot.String(), plan.Value(), starts,
		c.MustExist, b.waitMS(), ledger.Origin{Note: c.Note}.String()).
		Scan(&status, &granted.Lot, &granted.Amount, &granted.Seq, &granted.At, &expires, &refused,
			&granted.Revoked, &granted.RenewalsEnded)
	if err != nil {
		return Granted{}, failed("grant", err)
	}
	if expires != nil {
		granted.Expires = expires.UTC()
	}
	granted.At, granted.Replayed = granted.At.UTC(), status == "same"
	switch {
	case len(refused) > 0:
		return Granted{}, call.Refused(refused)
	case status == "conflict":
		return Granted{}, fmt.Errorf("%w: wallet %q, reference %q", ErrConflict, g.Wallet, g.Reference)
	case status == "ended":
		return Granted{}, g.ended(granted)
	case status == "granted":
		b.tellLots(ctx, "granted")
	}
	return granted, nil
}

// ended is the refusal of a lot that is over.
func (g Grant) ended(over Granted) error {
	now := over.At.Format(time.RFC3339Nano)
	if g.Ends.renews() {
		return fmt.Errorf("%w: it starts at %s, more than 24 of its periods before %s", ErrExpired,
			g.Starts.UTC().Format(time.RFC3339Nano), now)
	}
	return fmt.Errorf("%w: it ends at %s, and it is %s", ErrExpired, over.Expires.Format(time.RFC3339Nano), now)
}

// lot validates a grant, and turns it into the lot that is sent.
func (b *Book) lot(g Grant) (ledger.Lot, error) {
	if err := cmp.Or(checkWallet("Grant.Wallet", g.Wallet), checkAmount("Grant.Amount", g.Amount),
		fault.Text(errArgument, "Grant.Category", g.Category, maxTextBytes),
		fault.Text(errArgument, "Grant.Reference", g.Reference, maxTextBytes)); err != nil {
		return ledger.Lot{}, err
	}
	lot := ledger.Lot{Amount: g.Amount, Prorated: g.Ends.prorated(), Expires: g.Ends.at, Lasts: g.Ends.last,
		Category: g.Category, Reference: g.Reference, Priority: b.cfg.Priorities[g.Category]}
	if first := g.Ends.firstUnits(); first != nil {
		lot.Amount = *first
	}
	if g.Priority != nil {
		lot.Priority = *g.Priority
	}
	if err := checkPriority("Grant.Priority", lot.Priority); err != nil {
		return ledger.Lot{}, err
	}
	if err := g.Ends.check("Grant.Ends"); err != nil {
		return ledger.Lot{}, err
	}
	if g.Roll != nil {
		if err := g.Roll.check("Grant.Roll"); err != nil {
			return ledger.Lot{}, err
		}
		if g.Ends.never() {
			return ledger.Lot{}, invalid("Grant.Roll", "is for a lot that ends")
		}
		lot.RollCap, lot.RollFor = g.Roll.Cap, g.Roll.Lasts.length
	}
	late := cmp.Or(g.LateRefunds, b.cfg.LateRefunds)
	if err := checkLate("Grant.LateRefunds", late); err != nil {
		return ledger.Lot{}, err
	}
	if late != Lapse {
		lasts := max(0, late) // 0 is for ever
		lot.Late = &lasts
	}
	if g.Reference != "" {
		lot.Fingerprint = g.fingerprint()
	}
	return lot, nil
}

// plan validates how a lot renews, and what it pays for.
func (g Grant) plan() (p ledger.Plan, err error) {
	if p.Renews, err = inBudget.Period("Grant.Ends", g.Ends.each); err != nil {
		return p, err
	}
	if g.Roll != nil {
		if err := g.Roll.plan(&p); err != nil {
			return p, err
		}
	}
	if g.Ends.renews() {
		if p.RenewAmount = g.Amount; g.Reference == "" {
			return p, invalid("Grant.Reference", "is missing, for a lot of each period")
		}
	}
	if !g.Starts.IsZero() {
		if err := checkYear("Grant.Starts", g.Starts); err != nil {
			return p, err
		}
		if g.Ends.kind == endsAt && !g.Starts.Before(g.Ends.at) {
			return p, invalid("Grant.Starts", "is not before the end")
		}
	}
	p.Uses, err = checkUses(g.Uses)
	return p, err
}

// checkUses are the uses in their order, each once.
func checkUses(uses []string) ([]string, error) {
	if len(uses) > maxUses {
		return nil, invalid("Grant.Uses", "are %d, want at most %d", len(uses), maxUses)
	}
	for _, use := range uses {
		if use == "" {
			return nil, invalid("Grant.Uses", "have an empty one")
		}
		if err := fault.Text(errArgument, "Grant.Uses", use, maxTextBytes); err != nil {
			return nil, err
		}
	}
	uses = slices.Clone(uses)
	slices.Sort(uses)
	return slices.Compact(uses), nil
}

// fingerprint is a hash of the fields that a repetition must have in common: those of the Grant,
// without defaults and without the note. Its first byte is 1, or 2 if the grant has a field that
// builds of 0.1.0 do not know.
func (g Grant) fingerprint() []byte {
	expires, ends := "", g.Ends
	if !ends.at.IsZero() {
		expires = ends.at.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)
	}
	var roll Roll
	if g.Roll != nil {
		roll = *g.Roll
	}
	text, _ := json.Marshal([]any{g.Wallet, g.Amount, expires, ends.last, g.Category, g.Priority,
		g.Reference, roll.Cap,
		roll.Lasts.length, g.LateRefunds})
	version := byte(1)
	if !g.Starts.IsZero() || ends.renews() || roll.Lasts.kind == endsEach || roll.Times != 0 ||
		roll.Shared || len(g.Uses) > 0 {
		version = 2
		starts := ""
		if !g.Starts.IsZero() {
			starts = g.Starts.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)
		}
		uses, _ := checkUses(g.Uses)
		more, _ := json.Marshal([]any{starts, ends.each, ends.firstUnits(), ends.prorated(),
			roll.Lasts.to, roll.Times, roll.Shared, uses})
		text = append(text, more...)
	}
	sum := sha256.Sum256(text)
	return append([]byte{version}, sum[:]...)
}

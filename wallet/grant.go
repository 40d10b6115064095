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
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
)

// Grant is a lot for a wallet.
type Grant struct {
	// Wallet is any scope, of 1 to 255 bytes. Its first grant makes it a wallet.
	Wallet string

	// Amount are the units of the lot, from 1 to 2^53.
	Amount int64

	// Expires is the lot's end, before the year 9000. Nothing is drawn of it from then on.
	// Defaults to no end.
	Expires time.Time

	// For is the time from the lot's beginning to its end, up to 36,525 days. Set it in place of
	// Expires.
	For time.Duration

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

	// RollCap is the most units that roll over into another lot at the lot's end. Defaults to
	// none.
	RollCap int64

	// RollFor is how long the units that roll over last, up to 36,525 days. Defaults to for ever.
	RollFor time.Duration

	// RollTo makes the units that roll over last until the end of the period in which they do. Set
	// it in place of RollFor.
	RollTo budget.Period

	// RollTimes is how often units roll over, up to 10,000, or -1 for always. Defaults to once.
	RollTimes int

	// RollShared makes RollCap the most rolled-over units of the Category together.
	RollShared bool

	// Starts is when the lot begins, or when it was bought: For counts from it, and Renews begins
	// with its period. It can be in the past, for a message that comes late, up to 24 periods of
	// Renews. Defaults to now.
	Starts time.Time
	// Renews makes the lot end with its period, and brings one like it in each period after that,
	// until Revoke.Renewals. It needs a Reference, neither Expires nor For, and a period of a day
	// at least.
	Renews budget.Period
	// Prorate gives the first lot of Renews the part of Amount for the rest of its period: from
	// Starts on, by time, rounded down, as Period.Prorate has it. That can be 0 units.
	Prorate bool
	// First is the units of the first lot of Renews, from 0 on, where you compute them in another
	// way. Defaults to Amount.
	First *int64

	// LateRefunds says how long units last that are refunded after the lot's end. Defaults to
	// Config.LateRefunds.
	LateRefunds Late

	Note budget.Note
}

// Granted is a made lot.
type Granted struct {
	Lot      int64     `json:"lot"`    // 0 if Rollover found no unit
	Amount   int64     `json:"amount"` // of the lot
	Seq      int64     `json:"seq"`    // of the entry
	At       time.Time `json:"at,omitzero"`
	Expires  time.Time `json:"expires_at,omitzero"` // zero for never
	Replayed bool      `json:"replayed,omitempty"`  // an earlier call made it
	// Revoked is the units that Revoke has taken back from the lot of a grant that was made before,
	// and from those in which it went on. The grant brings them no second time: Reinstate does.
	Revoked int64 `json:"revoked,omitempty"`
	// RenewalsEnded reports that no lot of such a grant comes any more, because Revoke ended its
	// Renews.
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
	err = answer.QueryRow(ctx, tx, b.sql.grant, g.Wallet, c.Key, lot.String(), plan.Value(), starts, c.MustExist, b.waitMS(), ledger.Origin{Note: c.Note}.String()).
		Scan(&status, &granted.Lot, &granted.Amount, &granted.Seq, &granted.At, &expires, &refused, &granted.Revoked, &granted.RenewalsEnded)
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
	if !g.Renews.IsZero() {
		return fmt.Errorf("%w: it starts at %s, more than 24 of its periods before %s", ErrExpired, g.Starts.UTC().Format(time.RFC3339Nano), now)
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
	lot := ledger.Lot{Amount: g.Amount, Prorated: g.Prorate, Expires: g.Expires, Lasts: g.For, Category: g.Category, Reference: g.Reference,
		Priority: b.cfg.Priorities[g.Category], RollCap: g.RollCap}
	if g.First != nil {
		lot.Amount = *g.First
	}
	if g.Priority != nil {
		lot.Priority = *g.Priority
	}
	if err := checkPriority("Grant.Priority", lot.Priority); err != nil {
		return ledger.Lot{}, err
	}
	switch {
	case g.For != 0 && !g.Expires.IsZero():
		return ledger.Lot{}, invalid("Grant.For", "and Expires exclude each other")
	case g.For != 0:
		if err := checkDuration("Grant.For", g.For); err != nil {
			return ledger.Lot{}, err
		}
	case !g.Expires.IsZero() && (g.Expires.Year() < 1 || g.Expires.UTC().Year() >= 9000):
		return ledger.Lot{}, invalid("Grant.Expires", "is not before the year 9000")
	}
	switch {
	case g.RollCap == 0 && g.RollFor != 0:
		return ledger.Lot{}, invalid("Grant.RollFor", "is for a RollCap")
	case g.RollCap != 0:
		if err := checkAmount("Grant.RollCap", g.RollCap); err != nil {
			return ledger.Lot{}, err
		}
		if g.For == 0 && g.Expires.IsZero() && g.Renews.IsZero() {
			return ledger.Lot{}, invalid("Grant.RollCap", "is for a lot that ends")
		}
		if g.RollFor != 0 {
			if err := checkDuration("Grant.RollFor", g.RollFor); err != nil {
				return ledger.Lot{}, err
			}
		}
		lot.RollFor = g.RollFor
	}
	late := cmp.Or(g.LateRefunds, b.cfg.LateRefunds)
	if err := checkLate("Grant.LateRefunds", late); err != nil {
		return ledger.Lot{}, err
	}
	if late != Lapse {
		lasts := max(0, time.Duration(late)) // 0 is for ever
		lot.Late = &lasts
	}
	if g.Reference != "" {
		lot.Fingerprint = g.fingerprint()
	}
	return lot, nil
}

// tooShort reports whether a period is no day long. A call writes all that came since the last one,
// so that nothing comes more often.
func tooShort(p budget.Period) bool { return p.Length != 0 && p.Length < day }

// plan validates how a lot renews and rolls over.
func (g Grant) plan() (p ledger.Plan, err error) {
	if p.Renews, err = inBudget.Period("Grant.Renews", g.Renews); err != nil {
		return p, err
	}
	if p.RollTo, err = inBudget.Period("Grant.RollTo", g.RollTo); err != nil {
		return p, err
	}
	ends := g.For != 0 || !g.Expires.IsZero()
	switch {
	case !g.Renews.IsZero() && ends:
		return p, invalid("Grant.Renews", "excludes Expires and For: a lot ends with its period")
	case !g.Renews.IsZero() && g.Reference == "":
		return p, invalid("Grant.Renews", "is for a grant with a Reference")
	case tooShort(g.Renews):
		return p, invalid("Grant.Renews", "%v is shorter than a day", g.Renews.Length)
	case g.Prorate && g.Renews.IsZero():
		return p, invalid("Grant.Prorate", "is for a grant that Renews")
	case g.First != nil && g.Renews.IsZero():
		return p, invalid("Grant.First", "is for a grant that Renews")
	case g.First != nil && g.Prorate:
		return p, invalid("Grant.First", "and Prorate exclude each other")
	case g.First != nil && (*g.First < 0 || *g.First > bounds.MaxAmount):
		return p, invalid("Grant.First", "%d is not from 0 to %d", *g.First, int64(bounds.MaxAmount))
	case g.RollCap == 0 && (!g.RollTo.IsZero() || g.RollTimes != 0 || g.RollShared):
		return p, invalid("Grant.RollCap", "is missing, for RollTo, RollTimes and RollShared")
	case !g.RollTo.IsZero() && g.RollFor != 0:
		return p, invalid("Grant.RollTo", "and RollFor exclude each other")
	case g.RollTimes < -1 || g.RollTimes > maxRolls:
		return p, invalid("Grant.RollTimes", "%d is not from 1 to %d, nor -1", g.RollTimes, maxRolls)
	case g.RollTimes != 0 && g.RollTimes != 1 && (tooShort(g.RollTo) || g.RollTo.IsZero() && g.RollFor < day):
		return p, invalid("Grant.RollTimes", "is for units that end again: write RollTo or RollFor, of a day or more")
	case !g.Starts.IsZero() && (g.Starts.Year() < 1 || g.Starts.UTC().Year() >= 9000):
		return p, invalid("Grant.Starts", "is not before the year 9000")
	case !g.Starts.IsZero() && !g.Expires.IsZero() && !g.Starts.Before(g.Expires):
		return p, invalid("Grant.Starts", "is not before Expires")
	}
	if p.Uses, err = checkUses(g.Uses); err != nil {
		return p, err
	}
	if p.RollShared = g.RollShared; g.RollTimes != 0 {
		p.RollAgain = max(g.RollTimes-1, -1)
	}
	if g.RollTimes < 0 {
		p.RollAgain = -1
	}
	if !g.Renews.IsZero() {
		p.RenewAmount = g.Amount
	}
	return p, nil
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
	expires := ""
	if !g.Expires.IsZero() {
		expires = g.Expires.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)
	}
	text, _ := json.Marshal([]any{g.Wallet, g.Amount, expires, g.For, g.Category, g.Priority, g.Reference, g.RollCap, g.RollFor, g.LateRefunds})
	version := byte(1)
	if !g.Starts.IsZero() || !g.Renews.IsZero() || !g.RollTo.IsZero() || g.RollTimes != 0 || g.RollShared || len(g.Uses) > 0 {
		version = 2
		starts := ""
		if !g.Starts.IsZero() {
			starts = g.Starts.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)
		}
		uses, _ := checkUses(g.Uses)
		more, _ := json.Marshal([]any{starts, g.Renews, g.First, g.Prorate, g.RollTo, g.RollTimes, g.RollShared, uses})
		text = append(text, more...)
	}
	sum := sha256.Sum256(text)
	return append([]byte{version}, sum[:]...)
}

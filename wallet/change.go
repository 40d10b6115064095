package wallet

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/savepoint"
)

// Change changes a plan: a Grant that ends with EachPeriod. The zero values of To, AtEnd and Resume cancel the
// plan now.
type Change struct {
	// Wallet is the scope of the wallet that has the plan.
	Wallet string

	// Reference names the change within its wallet, in up to 255 bytes, such as the id of the
	// message that asks for it. It makes the change idempotent until a purge takes its entries.
	Reference string

	// Plan is the Reference of the plan's grant.
	Plan string

	// To is the plan in place of it: a Grant that ends with EachPeriod. Its Wallet is the Change's. Its Reference
	// names the new plan and is new, and defaults to that of the Change. Its Starts lies in the
	// present period, for a message that comes late. Defaults to none: the plan is cancelled.
	To *Grant

	// AtEnd makes the change when the present period ends. Until then Resume or another change can
	// take its place. Defaults to now.
	AtEnd bool

	// Carry leaves the units of the present period until their end. By default a change that is
	// made now takes them back, unless they are drawn or held. With Carry, EachPeriodProrated gives
	// the part of the units that To has more than Plan.
	Carry bool

	// Resume takes back the change of Plan that was to be made at the period's end.
	Resume bool

	// Note is stored with the entries of the change.
	Note budget.Note
}

// Changed is what a Change did.
type Changed struct {
	// Plan is the Reference of the plan that was changed.
	Plan string `json:"plan"`

	// At is when the change takes effect.
	At time.Time `json:"at"`

	// Ends is the end of the period of Plan in which the change was made.
	Ends time.Time `json:"ends"`

	// To is the reference of the new plan, or "".
	To string `json:"to,omitempty"`

	// Lot is the number of the first lot of the new plan.
	Lot int64 `json:"lot,omitempty"`

	// Amount are the units of that lot.
	Amount int64 `json:"amount,omitempty"`

	// Expires is the end of that lot.
	Expires time.Time `json:"expires_at,omitzero"`

	// Taken are the units of the present period that were taken back.
	Taken int64 `json:"taken,omitempty"`

	// Held are the units of the present period in holds and leases: they pay for what these spend,
	// and what they free can be drawn until Ends.
	Held int64 `json:"held,omitempty"`

	// Replaced is the reference of a change that was to take effect later, and does not any more.
	Replaced string `json:"replaced,omitempty"`

	// Resumed reports that the plan renews as before.
	Resumed bool `json:"resumed,omitempty"`

	// Replayed says that an earlier call with the same Reference made the change.
	Replayed bool `json:"-"`
}

// String says what happened, in a line for a log.
func (c Changed) String() string {
	var b strings.Builder
	at := c.At.UTC().Format(time.RFC3339Nano)
	switch {
	case c.Resumed:
		fmt.Fprintf(&b, "%s renews", c.Plan)
	case c.To == "":
		fmt.Fprintf(&b, "%s ends at %s", c.Plan, at)
	default:
		fmt.Fprintf(&b, "%s after %s from %s, with %d until %s", c.To, c.Plan, at, c.Amount,
			c.Expires.UTC().Format(time.RFC3339Nano))
	}
	if c.Taken > 0 {
		fmt.Fprintf(&b, ", %d taken back", c.Taken)
	}
	if c.Held > 0 {
		fmt.Fprintf(&b, ", %d held", c.Held)
	}
	if c.Replaced != "" {
		fmt.Fprintf(&b, ", in place of %s", c.Replaced)
	}
	if c.Replayed {
		b.WriteString(" (before)")
	}
	return b.String()
}

const beginChangeSQL = `
select at, fingerprint, answer, coalesce(effect_at, 'epoch'), coalesce(to_plan, ''), coalesce(by_reference, '')
from metered.begin_change($1::text, $2::bigint, $3::text, $4::text, $5::int)`

const planStateSQL = `
select at, starts, ends, next, lots, coalesce(held, 0), coalesce(first, 0)
from metered.plan_state($1::text, $2::text, $3::bigint, $4::metered.lot_plan, $5::timestamptz, $6::bool)`

const noteChangeSQL = `
select metered.note_change($1::text, $2::text, $3::text, nullif($4::text, ''), $5::timestamptz, $6::text, $7::bytea, $8::jsonb)`

// early is how far a Grant.Starts may be ahead of the database's clock and still be now.
const early = 5 * time.Minute

// Change changes, cancels or resumes a plan, all of it or nothing. The same change again answers as
// the first one did (Replayed), and another one under its reference is ErrConflict. A change takes
// the place of one that waits for the period's end. Units that rolled over from earlier periods
// stay. Overdraft is paid back by the new plan's first lot when that begins.
//
// Refusals: ErrConflict, ErrUnknownLot, if the wallet has no such plan or it has not begun, and
// ErrExpired, if the plan is over or another change of it has taken effect.
func (b *Book) Change(ctx context.Context, tx pgx.Tx, c Change) (changed Changed, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx)); err != nil {
		return Changed{}, err
	}
	if c, err = b.changing(c); err != nil {
		return Changed{}, err
	}
	ctx, span := b.begin(ctx, "wallet.change")
	defer func() { span.End(err) }()
	return savepoint.In(ctx, tx, "wallet", func(tx pgx.Tx) (Changed, error) { return b.change(ctx, tx, c) })
}

// changing validates a Change, and fills in its defaults.
func (b *Book) changing(c Change) (Change, error) {
	for _, name := range []struct{ field, text string }{{"Change.Reference", c.Reference},
		{"Change.Plan", c.Plan}} {
		if name.text == "" {
			return c, invalid(name.field, "is empty")
		}
		if err := fault.Text(errArgument, name.field, name.text, maxTextBytes); err != nil {
			return c, err
		}
	}
	if _, _, err := b.revoking(Revoke{Wallet: c.Wallet, Reference: c.Plan, Renewals: true,
		Note: c.Note}); err != nil {
		return c, named("Change", err)
	}
	switch {
	case c.Resume && (c.To != nil || c.AtEnd || c.Carry):
		return c, invalid("Change.Resume", "excludes To, AtEnd and Carry")
	case c.AtEnd && c.Carry:
		return c, invalid("Change.Carry", "is for a change that is made now: at the end no unit is taken back")
	case c.To == nil:
		return c, nil
	}
	to := *c.To
	if to.Wallet != "" && to.Wallet != c.Wallet {
		return c, invalid("Change.To.Wallet", "%q is not the wallet of the Change", to.Wallet)
	}
	to.Wallet, to.Reference = c.Wallet, cmp.Or(to.Reference, c.Reference)
	switch {
	case !to.Ends.renews():
		return c, invalid("Change.To.Ends", "is not EachPeriod")
	case to.Reference == c.Plan:
		return c, invalid("Change.To.Reference", "is that of Plan")
	case c.AtEnd && !to.Starts.IsZero():
		return c, invalid("Change.To.Starts", "and AtEnd exclude each other")
	}
	_, err := b.lot(to)
	if err == nil {
		_, err = to.plan()
	}
	c.To = &to
	return c, named("Change.To", err)
}

// named is an argument's error with the field that the caller knows.
func named(in string, err error) error {
	var argument *fault.Argument
	if errors.As(err, &argument) {
		_, field, _ := strings.Cut(argument.Field, ".")
		return invalid(in+"."+field, "%s", argument.Reason)
	}
	return err
}

// fingerprint is a hash of what a repetition must have in common: all but notes.
func (c Change) fingerprint() []byte {
	var to []byte
	if c.To != nil {
		first, _ := json.Marshal([]any{c.To.Ends.firstUnits(), c.To.Ends.prorated()})
		to = append(c.To.fingerprint(), first...)
	}
	text, _ := json.Marshal([]any{c.Wallet, c.Reference, c.Plan, to, c.AtEnd, c.Carry, c.Resume})
	sum := sha256.Sum256(text)
	return append([]byte{1}, sum[:]...)
}

// change makes a change in a savepoint.
func (b *Book) change(ctx context.Context, tx pgx.Tx, c Change) (changed Changed, err error) {
	changed.Plan = c.Plan
	print := c.fingerprint()
	var before, given []byte
	var effect time.Time
	var waiting, by string
	err = answer.QueryRow(ctx, tx, b.sql.beginChange, c.Wallet, b.ledger.LockKey(c.Wallet),
		c.Reference, c.Plan, b.waitMS()).
		Scan(&changed.At, &before, &given, &effect, &waiting, &by)
	switch {
	case err != nil:
		return changed, failed("change", err)
	case len(before) > 0 && string(before) != string(print):
		return Changed{}, fmt.Errorf("%w: wallet %q, change %q", ErrConflict, c.Wallet, c.Reference)
	case len(before) > 0:
		changed.Replayed = true
		if err := json.Unmarshal(given, &changed); err != nil {
			return Changed{}, failed("read a change", err)
		}
		return changed, nil
	case by != "" && !effect.After(changed.At):
		return Changed{}, fmt.Errorf("%w: wallet %q, plan %q: the change %q took effect at %s",
			ErrExpired, c.Wallet, c.Plan, by,
			effect.UTC().Format(time.RFC3339Nano))
	}
	if changed.Replaced = by; waiting != "" {
		if _, err := b.Revoke(ctx, tx, Revoke{Wallet: c.Wallet, Reference: waiting, Renewals: true,
			Note: c.Note}); err != nil {
			return Changed{}, err
		}
	}
	kind := "changed"
	if c.Resume {
		kind = "resumed"
		err = b.resume(ctx, tx, c, &changed)
	} else {
		err = b.replace(ctx, tx, c, &changed)
	}
	if err != nil {
		return Changed{}, err
	}
	changed.At, changed.Ends, changed.Expires = changed.At.UTC(), changed.Ends.UTC(), changed.Expires.UTC()
	if given, err = json.Marshal(changed); err != nil {
		return Changed{}, failed("keep a change", err)
	}
	_, err = tx.Exec(ctx, b.sql.noteChange, c.Wallet, c.Reference, c.Plan, changed.To, changed.At,
		kind, print, string(given))
	if err != nil {
		return Changed{}, failed("keep a change", err)
	}
	return changed, nil
}

// resume makes a plan renew as before.
func (b *Book) resume(ctx context.Context, tx pgx.Tx, c Change, changed *Changed) error {
	back, err := b.Reinstate(ctx, tx, Revoke{Wallet: c.Wallet, Reference: c.Plan, Renewals: true, Note: c.Note})
	if err != nil {
		return err
	}
	changed.Resumed = true
	if !back.At.IsZero() {
		changed.At = back.At
	}
	now, err := b.planState(ctx, tx, c, 0)
	if now.ends != nil {
		changed.Ends = *now.ends
	}
	return err
}

// replace ends a plan, and puts another one in its place.
func (b *Book) replace(ctx context.Context, tx pgx.Tx, c Change, changed *Changed) error {
	ended, err := b.Revoke(ctx, tx, Revoke{Wallet: c.Wallet, Reference: c.Plan, Renewals: true, Note: c.Note})
	if err != nil {
		return err
	}
	now, err := b.planState(ctx, tx, c, ended.Seq)
	switch {
	case err != nil:
		return err
	case now.starts == nil && now.next != nil:
		return fmt.Errorf("%w: wallet %q: the plan %q has not begun: change the plan before it, or revoke it", ErrUnknownLot, c.Wallet, c.Plan)
	case now.starts == nil:
		return fmt.Errorf("%w: wallet %q: the plan %q is over", ErrExpired, c.Wallet, c.Plan)
	}
	changed.At, changed.Ends, changed.Held = now.at, *now.ends, now.held
	if c.AtEnd {
		changed.Held = 0
		if changed.At = *now.ends; now.next != nil {
			changed.At = *now.next
		}
	}
	if c.To != nil && !c.To.Starts.IsZero() {
		switch starts := c.To.Starts.Truncate(time.Microsecond); {
		case starts.Before(*now.starts):
			return fmt.Errorf("%w: wallet %q: the plan %q has been in the period from %s on",
				ErrExpired, c.Wallet, c.Plan,
				now.starts.UTC().Format(time.RFC3339Nano))
		case starts.After(now.at.Add(early)):
			return invalid("Change.To.Starts", "is in the future")
		case starts.Before(now.at):
			changed.At = starts
		}
	}
	if !c.AtEnd && !c.Carry {
		for _, lot := range now.lots {
			taken, err := b.Revoke(ctx, tx, Revoke{Wallet: c.Wallet, Lot: lot, Note: c.Note})
			if err != nil {
				return err
			}
			changed.Taken += taken.Amount
		}
	}
	if c.To == nil {
		return nil
	}
	to := *c.To
	to.Starts, to.Note = changed.At, cmp.Or(to.Note, c.Note)
	if to.Ends.prorated() && c.Carry {
		to.Ends = EachPeriodWithFirst(to.Ends.each, now.first)
	}
	granted, err := b.Grant(ctx, tx, to)
	switch {
	case err != nil:
		return err
	case granted.Replayed:
		return fmt.Errorf("%w: wallet %q, reference %q", ErrConflict, c.Wallet, to.Reference)
	}
	changed.To, changed.Lot, changed.Amount, changed.Expires = to.Reference, granted.Lot,
		granted.Amount, granted.Expires
	return nil
}

// planState is a plan as of an entry.
type planState struct {
	at                 time.Time
	starts, ends, next *time.Time
	lots               []int64
	held, first        int64
}

func (b *Book) planState(ctx context.Context, tx pgx.Tx, c Change, seq int64) (s planState, err error) {
	var plan ledger.Plan
	var since *time.Time
	if c.To != nil {
		if plan, err = c.To.plan(); err != nil {
			return s, err
		}
		if !c.To.Starts.IsZero() {
			since = &c.To.Starts
		}
	}
	err = answer.QueryRow(ctx, tx, b.sql.planState, c.Wallet, c.Plan, seq, plan.Value(), since, c.AtEnd).
		Scan(&s.at, &s.starts, &s.ends, &s.next, &s.lots, &s.held, &s.first)
	if err != nil {
		return s, failed("change", err)
	}
	return s, nil
}

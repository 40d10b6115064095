package wallet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// Overage is what a plan's lot paid back when it began: the wallet was overdrawn when the plan
// renewed.
type Overage struct {
	// Wallet is the scope of the wallet that has the plan.
	Wallet string

	// Plan is the Reference of the plan's grant.
	Plan string

	// At is a time in the period that began with it. Defaults to now.
	At time.Time

	// Forgive credits these units, once: they are invoiced, and the new period has all of its
	// units. The lot has the category, priority and uses of the plan's lot and ends with it, or if
	// that is over, with the present one. It does not roll over.
	Forgive bool

	// Note is stored with the entry, if Forgive writes one.
	Note budget.Note
}

const overageSQL = `
select status, coalesce(no, 0), coalesce(paid, 0), coalesce(restored, 0), ends, coalesce(category, ''), coalesce(priority, 0), uses
from metered.plan_overage($1::text, $2::bigint, $3::text, $4::timestamptz, $5::int)`

// Overage tells how many units the wallet was overdrawn by when a plan renewed, as far as the lot
// of the new period has paid them back: Amount of the answer. With Forgive, Lot is the lot that
// brings them again. A call for the same period has the same Amount, and credits nothing more
// (Replayed). Refusal: ErrUnknownLot, if no lot of the plan has begun for that time.
func (b *Book) Overage(ctx context.Context, tx pgx.Tx, o Overage) (over Granted, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx), checkWallet("Overage.Wallet", o.Wallet),
		fault.Text(errArgument, "Overage.Plan", o.Plan, maxTextBytes)); err != nil {
		return Granted{}, err
	}
	switch {
	case o.Plan == "":
		return Granted{}, invalid("Overage.Plan", "is empty")
	case !o.At.IsZero() && (o.At.Year() < 1 || o.At.UTC().Year() >= 9000):
		return Granted{}, invalid("Overage.At", "is not before the year 9000")
	}
	if _, err := b.priced(o.Wallet, o.Note); err != nil {
		return Granted{}, err
	}
	ctx, span := b.begin(ctx, "wallet.overage")
	defer func() { span.End(err) }()
	if err := b.writeDue(ctx, tx, o); err != nil {
		return Granted{}, err
	}
	var at, ends *time.Time
	var status string
	var no, paid, restored int64
	g := Grant{Wallet: o.Wallet, Note: o.Note, Priority: new(int)}
	if !o.At.IsZero() {
		at = &o.At
	}
	err = answer.QueryRow(ctx, tx, b.sql.overage, o.Wallet, b.ledger.LockKey(o.Wallet), o.Plan, at, b.waitMS()).
		Scan(&status, &no, &paid, &restored, &ends, &g.Category, g.Priority, &g.Uses)
	switch {
	case err != nil:
		return Granted{}, failed("overage", err)
	case status == "unknown":
		return Granted{}, fmt.Errorf("%w: wallet %q: no lot of the plan %q has begun for that time",
			ErrUnknownLot, o.Wallet, o.Plan)
	case paid == 0 || restored == 0 && !o.Forgive:
		return Granted{Amount: paid}, nil
	case restored != 0:
		return Granted{Lot: restored, Amount: paid, Expires: utc(ends), Replayed: true}, nil
	}
	g.Amount, g.Reference = paid, fmt.Sprintf("overage of lot %d", no)
	if ends != nil {
		g.Ends = At(*ends)
	}
	return b.Grant(ctx, tx, g)
}

const lotEndSQL = `select nullif(expires_at, 'infinity') from metered.lots where scope = $1::text and reference = $2::text`

// writeDue writes what is due in a wallet, so that the lot of a period is there that has begun
// since the last write: it sets an end that a lot has already.
func (b *Book) writeDue(ctx context.Context, tx pgx.Tx, o Overage) error {
	var ends *time.Time
	switch err := answer.QueryRow(ctx, tx, b.sql.lotEnd, o.Wallet, o.Plan).Scan(&ends); {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return failed("overage", err)
	}
	_, err := b.SetEnd(ctx, tx, LotEnd{Wallet: o.Wallet, Reference: o.Plan, Expires: utc(ends), Note: o.Note})
	return err
}

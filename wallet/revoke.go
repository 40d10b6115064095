package wallet

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
)

// Revoke takes credit back.
type Revoke struct {
	// Wallet is the scope of the wallet that has the lot.
	Wallet string

	// Lot is the number of the lot, as Balance shows it. Set Lot or Reference.
	Lot int64

	// Reference is that of the lot's grant.
	Reference string

	// Amount are the units to take back, up to 2^53. Defaults to all of the lot.
	Amount int64

	// Renewals takes back all lots of the Reference's EachPeriod that have not begun. The present lot
	// stays.
	Renewals bool

	// Note is stored with the entries.
	Note budget.Note
}

// Revoked has the units taken back.
type Revoked struct {
	// Lot is the number of the lot. It is 0 for Renewals.
	Lot int64 `json:"lot"`

	// Amount are the units that were taken back.
	Amount int64 `json:"amount"`

	// Missing are the units that could not be taken back. For a whole lot they are its drawn and
	// held units.
	Missing int64 `json:"missing"`

	// Seq is the last entry that the call wrote, or 0.
	Seq int64 `json:"seq"`
}

const revokeSQL = `
select status, coalesce(no, 0), coalesce(revoked, 0), coalesce(missing, 0), coalesce(seq, 0), crossed
from metered.revoke_lot($1::text, $2::bigint, $3::bigint, $4::text, $5::bigint, (($6::metered.new_charge[])[1]).limits, $7::int, $8::metered.origin)`

const renewalSQL = `
select status, coalesce(no, 0), coalesce(revoked, 0), coalesce(missing, 0), coalesce(seq, 0), crossed
from metered.end_renewal($1::text, $2::bigint, $4::text, (($6::metered.new_charge[])[1]).limits, $7::int, $8::metered.origin)
where $3::bigint is null and $5::bigint is null`

// Revoke takes back units of a lot, and of lots that it rolled over into, that are neither drawn
// nor held. A second call for a whole lot takes nothing more. Reinstate undoes it. Refusal:
// ErrUnknownLot.
func (b *Book) Revoke(ctx context.Context, tx pgx.Tx, r Revoke) (revoked Revoked, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx)); err != nil {
		return Revoked{}, err
	}
	named, units, err := b.revoking(r)
	if err != nil {
		return Revoked{}, err
	}
	sql := b.sql.revoke
	if r.Renewals {
		sql = b.sql.renewal
	}
	ctx, span := b.begin(ctx, "wallet.revoke")
	defer func() { span.End(err) }()
	var status string
	err = named.lower(ctx, tx, &status, func(tx pgx.Tx, charges string) (crossed []byte, err error) {
		err = answer.QueryRow(ctx, tx, sql, r.Wallet, named.key, named.lot, named.reference, units,
			charges, b.waitMS(), named.origin).
			Scan(&status, &revoked.Lot, &revoked.Amount, &revoked.Missing, &revoked.Seq, &crossed)
		return crossed, failed("revoke", err)
	})
	if err != nil {
		return Revoked{}, err
	}
	if revoked.Amount > 0 {
		b.tellLots(ctx, "revoked")
	}
	return revoked, named.known(status)
}

// revoking validates a Revoke. units are its Amount, or nil for all.
func (b *Book) revoking(r Revoke) (named namedLot, units *int64, err error) {
	if r.Amount != 0 {
		if err := checkAmount("Revoke.Amount", r.Amount); err != nil {
			return named, nil, err
		}
		units = &r.Amount
	}
	if named, err = b.named("Revoke", r.Wallet, r.Lot, r.Reference, r.Note); err != nil {
		return named, nil, err
	}
	if r.Renewals && (r.Reference == "" || r.Amount != 0) {
		return named, nil, invalid("Revoke.Renewals", "is for a Reference, without an Amount")
	}
	return named, units, nil
}

// Rollover moves the rest of a lot into another before its end.
type Rollover struct {
	// Wallet is the scope of the wallet that has the lot.
	Wallet string

	// Lot is the number of the lot, as Balance shows it. Set Lot or Reference.
	Lot int64

	// Reference is that of the lot's grant.
	Reference string

	// Cap is the most units to move, from 1 to 2^53.
	Cap int64

	// For is the time until the new lot's end. Defaults to for ever.
	For time.Duration

	// Note is stored with the entries.
	Note budget.Note
}

const rolloverSQL = `
select status, coalesce(no, 0), coalesce(units, 0), coalesce(seq, 0), at, expires_at, crossed
from metered.roll_over($1::text, $2::bigint, row($3::bigint, $4::text, $5::bigint, $6::interval)::metered.lot_rollover, (($7::metered.new_charge[])[1]).limits, $8::int, $9::metered.origin)`

// Rollover rolls a lot over once: a second call returns the lot that the first, or the lot's end,
// made. Refusal: ErrUnknownLot.
func (b *Book) Rollover(ctx context.Context, tx pgx.Tx, r Rollover) (rolled Granted, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx), checkAmount("Rollover.Cap", r.Cap)); err != nil {
		return Granted{}, err
	}
	if r.For != 0 {
		if err := checkDuration("Rollover.For", r.For); err != nil {
			return Granted{}, err
		}
	}
	named, err := b.named("Rollover", r.Wallet, r.Lot, r.Reference, r.Note)
	if err != nil {
		return Granted{}, err
	}
	ctx, span := b.begin(ctx, "wallet.rollover")
	defer func() { span.End(err) }()
	var status string
	var at, expires *time.Time
	err = named.lower(ctx, tx, &status, func(tx pgx.Tx, charges string) (crossed []byte, err error) {
		err = answer.QueryRow(ctx, tx, b.sql.rollover, r.Wallet, named.key, named.lot,
			named.reference, r.Cap, r.For, charges, b.waitMS(), named.origin).
			Scan(&status, &rolled.Lot, &rolled.Amount, &rolled.Seq, &at, &expires, &crossed)
		return crossed, failed("roll over", err)
	})
	if err != nil {
		return Granted{}, err
	}
	if status == "rolled" {
		b.tellLots(ctx, "rolled over")
	}
	rolled.At, rolled.Expires, rolled.Replayed = utc(at), utc(expires), status == "same"
	return rolled, named.known(status)
}

// namedLot is a lot by its number or reference, with the origin of the call.
type namedLot struct {
	wallet         string
	key            int64
	lot, reference any // one of them is nil
	origin         string
	charge         *ledger.ChargeCall[budget.Receipt] // of the wallet, with its thresholds
}

func (b *Book) named(call, wallet string, lot int64, reference string,
	note budget.Note) (n namedLot, err error) {
	if err := cmp.Or(checkWallet(call+".Wallet", wallet),
		fault.Text(errArgument, call+".Reference", reference, maxTextBytes)); err != nil {
		return n, err
	}
	n = namedLot{wallet: wallet, key: b.ledger.LockKey(wallet)}
	switch {
	case lot < 0 || (lot > 0) == (reference != ""):
		return n, invalid(call+".Lot", "or Reference: either is required")
	case lot > 0:
		n.lot = lot
	default:
		n.reference = reference
	}
	// A charge of the same note, for its checks.
	if n.charge, err = b.priced(wallet, note); err != nil {
		return n, err
	}
	n.origin = ledger.Origin{Note: n.charge.Charges[0].Note}.String()
	return n, nil
}

// lower makes a call that may lower the wallet. Where that crosses thresholds it wrote nothing, and
// is made again, as one that reports.
func (n namedLot) lower(ctx context.Context, tx pgx.Tx, status *string,
	call func(tx pgx.Tx, charges string) (crossed []byte, err error)) error {
	_, err := ledger.SilentlyIn(ctx, tx, "wallet", func(tx pgx.Tx, telling bool) (_ struct{}, err error) {
		crossed, err := call(tx, ledger.Charges(ledger.Telling(n.charge.Charges, telling)))
		switch {
		case err != nil:
		case *status == "crossing":
			err = ledger.ErrCrossing
		default:
			err = n.charge.Cross(ctx, tx, crossed)
		}
		return struct{}{}, err
	})
	return err
}

func (n namedLot) known(status string) error {
	if status == "unknown" {
		if n.lot != nil {
			return fmt.Errorf("%w: wallet %q, lot %d", ErrUnknownLot, n.wallet, n.lot)
		}
		return fmt.Errorf("%w: wallet %q, reference %q", ErrUnknownLot, n.wallet, n.reference)
	}
	return nil
}

func utc(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}

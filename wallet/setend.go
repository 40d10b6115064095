package wallet

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
)

// LotEnd is a new end for a lot.
type LotEnd struct {
	// Wallet is the scope of the wallet that has the lot.
	Wallet string

	// Lot is the number of the lot, as Balance shows it. Set Lot or Reference.
	Lot int64

	// Reference is that of the lot's grant.
	Reference string

	// Expires is the new end, before the year 9000. Zero is never.
	Expires time.Time

	// Note is stored with the entry.
	Note budget.Note
}

const setEndSQL = `
select status, coalesce(no, 0), coalesce(units, 0), coalesce(seq, 0), at, crossed
from metered.set_lot_end($1::text, $2::bigint, $3::bigint, $4::text, coalesce($5::timestamptz, 'infinity'), (($6::metered.new_charge[])[1]).limits, $7::int, $8::metered.origin)`

// SetEnd makes a lot end earlier, later or never, also for held units and those that roll over. The
// same end again writes nothing (Replayed). Refusals: ErrUnknownLot, and ErrExpired if the lot or
// its new end is over.
func (b *Book) SetEnd(ctx context.Context, tx pgx.Tx, l LotEnd) (set Granted, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx)); err != nil {
		return Granted{}, err
	}
	if !l.Expires.IsZero() && (l.Expires.Year() < 1 || l.Expires.UTC().Year() >= 9000) {
		return Granted{}, invalid("LotEnd.Expires", "is not before the year 9000")
	}
	named, err := b.named("LotEnd", l.Wallet, l.Lot, l.Reference, l.Note)
	if err != nil {
		return Granted{}, err
	}
	ctx, span := b.begin(ctx, "wallet.set_end")
	defer func() { span.End(err) }()
	var ends *time.Time
	if !l.Expires.IsZero() {
		ends = &l.Expires
	}
	var status string
	var at *time.Time
	err = named.lower(ctx, tx, &status, func(tx pgx.Tx, charges string) (crossed []byte, err error) {
		err = answer.QueryRow(ctx, tx, b.sql.setEnd, l.Wallet, named.key, named.lot,
			named.reference, ends, charges, b.waitMS(), named.origin).
			Scan(&status, &set.Lot, &set.Amount, &set.Seq, &at, &crossed)
		return crossed, failed("set the end", err)
	})
	if err != nil {
		return Granted{}, err
	}
	set.At, set.Expires, set.Replayed = utc(at), utc(ends), status == "same"
	if status == "ended" {
		return Granted{}, fmt.Errorf("%w: wallet %q, lot %d", ErrExpired, l.Wallet, set.Lot)
	}
	return set, named.known(status)
}

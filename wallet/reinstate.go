package wallet

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
)

const reinstateSQL = `
select status, coalesce(no, 0), coalesce(reinstated, 0), coalesce(seq, 0), at, expires_at, crossed
from metered.reinstate_lot($1::text, $2::bigint, $3::bigint, $4::text, $5::bigint,
    (($6::metered.new_charge[])[1]).limits, $7::int, $8::metered.origin)`

const resumeRenewalSQL = `
select status, coalesce(no, 0), coalesce(reinstated, 0), coalesce(seq, 0), at, expires_at, crossed
from metered.resume_renewal($1::text, $2::bigint, $4::text,
    (($6::metered.new_charge[])[1]).limits, $7::int, $8::metered.origin)
where $3::bigint is null and $5::bigint is null`

// Reinstate gives back what Revoke took, under the same name: for a dispute that was won, or a
// subscription that is not cancelled after all. It takes the argument of that Revoke. Units go back
// to their lots, with their ends, uses and rollovers, and pay an overdraft back at once. With
// Renewals the next period brings its lot again, and so does each one after it. Amount of the
// answer is the units that came back. If nothing was revoked, it writes nothing (Replayed).
//
// A lot that was revoked, reinstated and revoked again can be reinstated again. So if the message
// that asks for it can come twice, run it in a command with the message's id.
//
// Refusals: ErrUnknownLot, and ErrExpired if the lot has ended, or the period whose lot was
// withdrawn has begun.
func (b *Book) Reinstate(ctx context.Context, tx pgx.Tx, r Revoke) (back Granted, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx)); err != nil {
		return Granted{}, err
	}
	named, units, err := b.revoking(r)
	if err != nil {
		return Granted{}, err
	}
	sql := b.sql.reinstate
	if r.Renewals {
		sql = b.sql.resumeRenewal
	}
	ctx, span := b.begin(ctx, "wallet.reinstate")
	defer func() { span.End(err) }()
	var status string
	var at, expires *time.Time
	err = named.lower(ctx, tx, &status, func(tx pgx.Tx, charges string) (crossed []byte, err error) {
		err = answer.QueryRow(ctx, tx, sql, r.Wallet, named.key, named.lot, named.reference, units,
			charges, b.waitMS(), named.origin).
			Scan(&status, &back.Lot, &back.Amount, &back.Seq, &at, &expires, &crossed)
		return crossed, failed("reinstate", err)
	})
	if err != nil {
		return Granted{}, err
	}
	back.At, back.Expires, back.Replayed = utc(at), utc(expires), status == "same"
	switch status {
	case "ended":
		return Granted{}, fmt.Errorf("%w: wallet %q, lot %d", ErrExpired, r.Wallet, back.Lot)
	case "reinstated":
		b.tellLots(ctx, "reinstated")
	}
	return back, named.known(status)
}

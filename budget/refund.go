package budget

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Refund is an amount to give back of one charge.
type Refund struct {
	// Scope and Seq name the charge, as its Posted does.
	Scope string
	Seq   int64
	// Amount is in units of yours, from 1 to what is left of the charge.
	Amount int64
	// Note is stored with the entry.
	Note Note
}

// RefundExceedsError says what could still be refunded.
type RefundExceedsError struct{ Requested, Remaining int64 }

func (e *RefundExceedsError) Error() string {
	return fmt.Sprintf("%v: requested %d, left %d", ErrRefundExceeds, e.Requested, e.Remaining)
}

// Unwrap returns ErrRefundExceeds.
func (e *RefundExceedsError) Unwrap() error { return ErrRefundExceeds }

const refundSQL = `
select status, coalesce(remaining, 0), coalesce(seq, 0), coalesce(at, 'epoch')
from metered.refund($1::text, $2::bigint, $3::bigint, $4::bigint, $5::int, $6::text, null, null)`

// Refund gives back part or all of a charge, once or several times, but never
// more than was charged. It counts at the time of the charge: spending in a
// window falls by the refund while the charge is inside the window, and both
// leave it together. Its cost does not grow with the number of refunds.
//
// Rolling tx back takes it back. There is no idempotency: a second call refunds
// again, as far as there is something left. Locks: the scope's advisory lock,
// until tx ends.
//
// Errors: *ArgumentError before any SQL. ErrUnknownEntry, ErrEntryPurged,
// ErrNotCharge and *RefundExceedsError wrote nothing and leave tx usable.
// ErrBusy, ErrOverflow, SQLSTATE 40001 and 40P01 abort it.
func (l *Ledger) Refund(ctx context.Context, tx pgx.Tx, r Refund) (Posted, error) {
	if err := checkScope("Refund.Scope", r.Scope); err != nil {
		return Posted{}, err
	}
	if r.Seq < 1 {
		return Posted{}, invalid("Refund.Seq", "%d is not the number of an entry", r.Seq)
	}
	if err := checkAmount("Refund.Amount", r.Amount); err != nil {
		return Posted{}, err
	}
	if err := r.Note.check("Refund.Note"); err != nil {
		return Posted{}, err
	}
	p := Posted{Scope: r.Scope, Amount: r.Amount}
	var status string
	var remaining int64
	err := tx.QueryRow(ctx, l.sql.refund, r.Scope, l.LockKey(r.Scope), r.Seq, r.Amount, l.waitMS(), r.Note.JSON()).
		Scan(&status, &remaining, &p.Seq, &p.At)
	if err != nil {
		return Posted{}, failed("refund", err)
	}
	entry := fmt.Sprintf("scope %q, entry %d", r.Scope, r.Seq)
	switch status {
	case "ok":
		return p, nil
	case "missing":
		return Posted{}, fmt.Errorf("%w: %s", ErrUnknownEntry, entry)
	case "purged":
		return Posted{}, fmt.Errorf("%w: %s", ErrEntryPurged, entry)
	case "kind":
		return Posted{}, fmt.Errorf("%w: %s", ErrNotCharge, entry)
	case "excess":
		return Posted{}, &RefundExceedsError{Requested: r.Amount, Remaining: remaining}
	}
	return Posted{}, fmt.Errorf("budget: refund: unknown status %q", status)
}

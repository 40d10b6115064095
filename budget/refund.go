package budget

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Refund gives units of a charge back.
type Refund struct {
	// Scope is the scope of the charge to refund. Together with Seq it names the charge.
	Scope string

	// Seq is the charge's Posted.Seq.
	Seq int64

	// Amount are the units to give back, from 1 to what is left of the charge.
	Amount int64

	// All gives back all that is left of the charge, at least one unit. Set All or Amount.
	All bool

	// Note is stored with the entry of the refund.
	Note Note
}

// RefundExceedsError is a refund of more units than are left of the charge.
type RefundExceedsError struct {
	// Requested are the units that the refund asked for. It is 0 for All.
	Requested int64

	// Remaining are the units that are left of the charge.
	Remaining int64
}

func (e *RefundExceedsError) Error() string {
	if e.Requested == 0 {
		return fmt.Sprintf("%v: nothing is left of it", ErrRefundExceeds)
	}
	return fmt.Sprintf("%v: requested %d, left %d", ErrRefundExceeds, e.Requested, e.Remaining)
}

func (e *RefundExceedsError) Unwrap() error { return ErrRefundExceeds }

const refundSQL = `
select status, coalesce(remaining, 0), coalesce(seq, 0), coalesce(at, 'epoch'), coalesce(amount, 0)
from metered.refund($1::text, $2::bigint, $3::bigint, $4::bigint, $5::int, $6::metered.origin, $7::bool)`

// Refund gives back a charge, in one or more calls. It counts at the charge's time.
func (l *Ledger) Refund(ctx context.Context, tx pgx.Tx, r Refund) (Posted, error) {
	return do(ctx, tx, l, "budget.refund", (*Ledger).prepareRefund, r)
}

// prepareRefund validates a refund as Refund does, without any SQL.
func (l *Ledger) prepareRefund(r Refund) (*ledger.Call[Posted], error) {
	if err := l.made(); err != nil {
		return nil, err
	}
	if err := checkScope("Refund.Scope", r.Scope); err != nil {
		return nil, err
	}
	if r.Seq < 1 && r.Seq > -1<<40 { // less is a time: see tallies.sql
		return nil, invalid("Refund.Seq", "%d is not the number of an entry", r.Seq)
	}
	var units *int64 // null is all
	if !r.All {
		if r.Amount == 0 {
			return nil, invalid("Refund.Amount", "is 0: say how many units, or All")
		}
		if err := checkAmount("Refund.Amount", r.Amount); err != nil {
			return nil, err
		}
		units = &r.Amount
	} else if r.Amount != 0 {
		return nil, invalid("Refund.Amount", "is %d, and All is asked for", r.Amount)
	}
	if err := l.checkNote("Refund.Note", r.Note); err != nil {
		return nil, err
	}
	key := l.LockKey(r.Scope)
	return &ledger.Call[Posted]{
		SQL: l.sql.refund, Locks: ledger.Locks{Keys: []int64{key}}, Scan: r.scan,
		Args: func(s ledger.Sending) []any {
			return []any{r.Scope, key, r.Seq, units, s.WaitMS, s.Origin(r.Note.json()), s.Raising}
		},
	}, nil
}

func (r Refund) scan(row pgx.Row) (Posted, error) {
	p := Posted{Scope: r.Scope}
	var answer struct {
		Status    string
		Remaining int64
	}
	err := row.Scan(&answer.Status, &answer.Remaining, &p.Seq, &p.At, &p.Amount)
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && pgErr.Code == sqlstate.RefundRefused:
		if err := json.Unmarshal([]byte(pgErr.Detail), &answer); err != nil {
			return Posted{}, failed("read a refusal", err)
		}
	case err != nil:
		return Posted{}, failed("refund", err)
	}
	entry := fmt.Sprintf("scope %q, entry %d", r.Scope, r.Seq)
	switch answer.Status {
	case "ok":
		return p, nil
	case "missing":
		return Posted{}, fmt.Errorf("%w: %s", ErrUnknownEntry, entry)
	case "purged":
		return Posted{}, fmt.Errorf("%w: %s", ErrEntryPurged, entry)
	case "kind":
		return Posted{}, fmt.Errorf("%w: %s", ErrNotCharge, entry)
	case "excess":
		return Posted{}, &RefundExceedsError{Requested: r.Amount, Remaining: answer.Remaining}
	}
	return Posted{}, fmt.Errorf("budget: refund: unknown status %q", answer.Status)
}

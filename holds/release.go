package holds

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
)

// Release names holds to free.
type Release struct {
	// Tenant is the tenant of the holds.
	Tenant string

	// IDs are the holds to free, from 1 to 100, all of them or none.
	IDs []string

	// Holder is who holds the units. A hold of another holder is ErrUnknown. Defaults to any
	// holder, unless Config.RequireHolder is set.
	Holder string

	// Captured also gives captured holds back, as Return does. Without it, a captured hold is a
	// *StateError.
	Captured bool

	// Note is stored with the transition.
	Note budget.Note
}

const releaseSQL = `
select refused, holds
from metered.release_holds($1::metered.hold_ids, $2::int, $3::metered.origin, $4::text, $5::bool)`

const releaseCapturedSQL = `
select refused, holds
from metered.release_captured($1::metered.hold_ids, $2::int, $3::metered.origin, $4::text, $5::bool)`

// Release frees held units. Errors: ErrUnknown, ErrRetired, *StateError, and ErrNotReturnable with
// Captured.
func (b *Book) Release(ctx context.Context, tx pgx.Tx, r Release) ([]Hold, error) {
	return do(ctx, tx, b, "holds.release", (*Book).prepareRelease, r)
}

// prepareRelease validates a release as Release does, without any SQL.
func (b *Book) prepareRelease(r Release) (*call, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	sql := b.sql.release
	if r.Captured {
		sql = b.sql.releaseCaptured
	}
	return b.prepare(sql, EventReleased, r.Tenant, r.IDs, r.Holder, r.Note)
}

// Return names captured holds, or units, to give back.
type Return struct {
	// Tenant is the tenant of the holds.
	Tenant string

	// IDs are the holds to give back, from 1 to 100, all of them or none. Lines need a single one.
	IDs []string

	// Holder is who holds the units. A hold of another holder is ErrUnknown. Defaults to any
	// holder, unless Config.RequireHolder is set.
	Holder string

	// All gives back all that is left. Set All or Lines.
	All bool

	// Lines are the units of one hold to give back, by scope. They have no Limits.
	Lines []Line

	// SkipPurged leaves purged charges spent (HistoryEvent.Skipped), but not a claim's own unit.
	SkipPurged bool

	// Note is stored with the transition and with the entries of the refunds.
	Note budget.Note
}

const returnSQL = `
select refused, holds
from metered.return_holds($1::metered.hold_ids, $2::metered.used_units[], $3::bool, $4::int, $5::metered.origin, $6::text, $7::bool)`

// Return refunds the charges of captured holds, whole or by Lines, and frees a confirmed claim,
// whose own unit goes back with all the rest. A hold without anything left is Returned. If a hold
// ended otherwise after Capture.Keep, use budget.Ledger.Refund.
//
// Errors: ErrUnknown, ErrRetired, *StateError, *ExcessError for more than is left,
// ErrNotReturnable.
func (b *Book) Return(ctx context.Context, tx pgx.Tx, r Return) ([]Hold, error) {
	return do(ctx, tx, b, "holds.return", (*Book).prepareReturn, r)
}

// prepareReturn validates a return as Return does, without any SQL.
func (b *Book) prepareReturn(r Return) (*call, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	if (len(r.Lines) > 0) == r.All {
		return nil, invalid("Return.Lines", "or All: either is required")
	}
	var parts []ledger.Used
	for i, line := range r.Lines {
		field := index("Return.Lines", i, "")
		switch {
		case len(r.IDs) != 1:
			return nil, invalid("Return.Lines", "are for one hold, and IDs are %d", len(r.IDs))
		case line.Amount < 1 || line.Amount > bounds.MaxAmount:
			return nil, invalid(field+".Amount", "%d is not from 1 to %d", line.Amount, int64(bounds.MaxAmount))
		case len(line.Limits) > 0:
			return nil, invalid(field+".Limits", "are not for a return")
		case slices.ContainsFunc(parts, func(u ledger.Used) bool { return u.Scope == line.Scope }):
			return nil, invalid(field+".Scope", "%q is there twice", line.Scope)
		case line.Scope == "" || checkText(field+".Scope", line.Scope) != nil:
			return nil, invalid(field+".Scope", "is no scope")
		}
		parts = append(parts, ledger.Used{Scope: line.Scope, Amount: line.Amount})
	}
	return b.prepare(b.sql.giveBack, EventReturned, r.Tenant, r.IDs, r.Holder, r.Note,
		ledger.AllUsed(parts), r.SkipPurged)
}

// Extend names holds to keep for longer.
type Extend struct {
	// Tenant is the tenant of the holds.
	Tenant string

	// IDs are the holds to keep for longer, from 1 to 100, all of them or none.
	IDs []string

	// Holder is who holds the units. A hold of another holder is ErrUnknown. Defaults to any
	// holder, unless Config.RequireHolder is set.
	Holder string

	// By is how much later the new deadline is, from 1µs to 10 years, in whole microseconds.
	By time.Duration

	// Note is stored with the transition.
	Note budget.Note
}

const extendSQL = `
select refused, holds
from metered.extend_holds($1::metered.hold_ids, $2::interval, $3::int, $4::metered.origin, $5::text, $6::bool)`

// Extend moves the deadlines of holds, with their grace. Errors: ErrUnknown, ErrRetired,
// *StateError past the deadline, even in the grace, ErrCeiling.
func (b *Book) Extend(ctx context.Context, tx pgx.Tx, e Extend) ([]Hold, error) {
	return do(ctx, tx, b, "holds.extend", (*Book).prepareExtend, e)
}

// prepareExtend validates an extension as Extend does, without any SQL.
func (b *Book) prepareExtend(e Extend) (*call, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	if e.By < time.Microsecond || e.By > bounds.MaxLifetime || e.By%time.Microsecond != 0 {
		return nil, invalid("Extend.By", "%v is not from 1µs to %v in whole microseconds", e.By,
			bounds.MaxLifetime)
	}
	return b.prepare(b.sql.extend, EventExtended, e.Tenant, e.IDs, e.Holder, e.Note, interval(e.By))
}

// prepare validates the common part of release, refund and extension. terms are the arguments of
// the statement that only one of them has.
func (b *Book) prepare(sql string, kind EventKind, tenant string, ids []string, holder string,
	note budget.Note, terms ...any) (*call, error) {
	ids = slices.Clone(ids) // the caller may use its own again
	if err := checkIDs(tenant, holder, ids); err != nil {
		return nil, err
	}
	if err := cmp.Or(b.required("Holder", holder), b.checkNote("Note", note)); err != nil {
		return nil, err
	}
	named := holdIDs(tenant, holder, ids)
	return &call{
		SQL: sql, Locks: ledger.Locks{Holds: &named}, Kind: string(kind), Tell: b.teller(kind, note),
		Args: func(s ledger.Sending) []any {
			return slices.Concat([]any{named.String()}, terms,
				[]any{s.WaitMS, s.Origin(inBudget.NoteJSON(note)), b.channel(), s.Raising})
		},
		Scan: scanner(false, func(err error) error { return failed(string(kind), err) }, refused, nil),
	}, nil
}

// scanner reads the answer of a transition of several holds: the holds, or why it was refused.
// crossed gets the thresholds crossed, for a transition that charges.
// A plain call answers by one value (ledger.Captured).
func scanner(plain bool, failed func(error) error, refused func([]byte) error, crossed *[]byte) func(pgx.Row) ([]Hold, error) {
	return func(row pgx.Row) ([]Hold, error) {
		var refusal, answer []byte
		var holds [][]byte
		if plain {
			err := row.Scan(&answer)
			if err == nil {
				refusal, holds, *crossed, err = ledger.Captured(answer)
			}
			return decoded(holds, refusal, err, failed, refused)
		}
		dest := []any{&refusal, &holds}
		if crossed != nil {
			dest = append(dest, crossed)
		}
		err := row.Scan(dest...)
		return decoded(holds, refusal, err, failed, refused)
	}
}

// decoded are the holds of an answer, or its error.
func decoded(holds [][]byte, refusal []byte, err error,
	failed func(error) error, refused func([]byte) error) ([]Hold, error) {
	switch {
	case err != nil:
		return nil, failed(err)
	case len(refusal) > 0:
		return nil, refused(refusal)
	}
	return decodeAll(holds)
}

// decodeAll reads the holds that a transition returned.
func decodeAll(rows [][]byte) ([]Hold, error) {
	holds := make([]Hold, len(rows))
	for i, row := range rows {
		if err := holds[i].decode(row); err != nil {
			return nil, err
		}
	}
	return holds, nil
}

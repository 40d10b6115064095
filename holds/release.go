package holds

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Release says which holds are given up.
type Release struct {
	// Tenant and IDs name the holds, up to MaxHolds of one tenant.
	Tenant string
	IDs    []string
	// Holder must be that of each hold. Defaults to "", not checked: say in Note who
	// released what was another's.
	Holder string
	// Note is recorded in the history, and with the ledger's entries.
	Note budget.Note
}

const releaseSQL = `
select refused, holds
from metered.release_holds($1::text, $2::text[], $3::timestamptz[], $4::text, $5::int, $6::text, $7::text, $8::text, $9::text, $10::bool)`

// Release frees what holds keep, all of them or none. What was captured of one
// stays spent. Locks, rollback and errors are those of Capture, without a denial. A
// hold that has ended is a *StateError that says how.
func (b *Book) Release(ctx context.Context, tx pgx.Tx, r Release) ([]Hold, error) {
	p, err := b.PrepareRelease(r)
	if err != nil {
		return nil, err
	}
	return p.run(ctx, tx)
}

// PrepareRelease validates a release as Release does, without any SQL.
func (b *Book) PrepareRelease(r Release) (*Prepared, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	return b.prepare(b.sql.release, EventReleased, r.Tenant, r.IDs, r.Holder, r.Note)
}

// Refund says which captured holds are given back.
type Refund struct {
	// Tenant and IDs name the holds, up to MaxHolds of one tenant.
	Tenant string
	IDs    []string
	// Holder must be that of each hold. Defaults to "", not checked.
	Holder string
	// SkipPurged gives back what can be refunded, which may be nothing, and leaves spent
	// the charges that were purged from the ledger; Event.Skipped in the History says which.
	// A claim's own unit is never skipped, since nobody could claim its key then. Defaults
	// to false: one charge that was purged is ErrNotReturnable.
	SkipPurged bool
	// Note is recorded in the history, and with the refunds.
	Note budget.Note
}

const refundSQL = `
select refused, holds
from metered.refund_holds($1::text, $2::text[], $3::timestamptz[], $4::text, $5::int, $6::text, $7::text, $8::bool, $9::text, $10::text, $11::bool)`

// Refund gives back all that captured holds spent, all of them or none, as refunds
// of their charges: capacity that was captured is free again, and so is a confirmed
// claim. The holds stay Captured, and are marked Returned. For a part of what was
// captured use budget.Ledger.Refund, with the entry's number from History; after that
// Refund is ErrNotReturnable. So it is once one of the charges was purged from the ledger,
// unless SkipPurged is set: without it, the key of an old claim that carries further lines
// would stay taken.
//
// Locks, rollback and the other errors are those of Capture. A hold that is not captured is
// a *StateError, and so is one that was given back before (ErrReturned). What was captured
// in part (Capture.Keep) of a hold that is still held, or was then released, or has
// expired, stays spent: give it back by budget.Ledger.Refund, too.
func (b *Book) Refund(ctx context.Context, tx pgx.Tx, r Refund) ([]Hold, error) {
	p, err := b.PrepareRefund(r)
	if err != nil {
		return nil, err
	}
	return p.run(ctx, tx)
}

// PrepareRefund validates a refund as Refund does, without any SQL.
func (b *Book) PrepareRefund(r Refund) (*Prepared, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	p, err := b.prepare(b.sql.refund, EventReturned, r.Tenant, r.IDs, r.Holder, r.Note)
	if err != nil {
		return nil, err
	}
	p.args = append(p.args, r.SkipPurged)
	return p, nil
}

// Extend says which holds are held for longer.
type Extend struct {
	// Tenant and IDs name the holds, up to MaxHolds of one tenant.
	Tenant string
	IDs    []string
	// Holder must be that of each hold. Defaults to "", not checked.
	Holder string
	// By is how much later the deadline will be, from 1µs to MaxMaxLifetime, in whole
	// microseconds. No deadline goes past Hold.Ceiling.
	By time.Duration
	// Note is recorded in the history.
	Note budget.Note
}

const extendSQL = `
select refused, holds
from metered.extend_holds($1::text, $2::text[], $3::timestamptz[], $4::text, $5::int, $6::text, $7::text, $8::interval, $9::text, $10::text, $11::bool)`

// Extend moves the deadlines of holds, all of them or none, and with each the end of
// its grace. A hold past its deadline is a *StateError (ErrExpired), also during its
// grace; one that would go past its ceiling a *CeilingError.
//
// Locks, rollback and the other errors are those of Release. There is no idempotency:
// a second call extends again.
func (b *Book) Extend(ctx context.Context, tx pgx.Tx, e Extend) ([]Hold, error) {
	p, err := b.PrepareExtend(e)
	if err != nil {
		return nil, err
	}
	return p.run(ctx, tx)
}

// PrepareExtend validates an extension as Extend does, without any SQL.
func (b *Book) PrepareExtend(e Extend) (*Prepared, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	if e.By < time.Microsecond || e.By > MaxMaxLifetime || e.By%time.Microsecond != 0 {
		return nil, invalid("Extend.By", "%v is not from 1µs to %v in whole microseconds", e.By, MaxMaxLifetime)
	}
	p, err := b.prepare(b.sql.extend, EventExtended, e.Tenant, e.IDs, e.Holder, e.Note)
	if err != nil {
		return nil, err
	}
	p.args = append(p.args, interval(e.By))
	return p, nil
}

// prepare validates what release, refund and extension have in common.
func (b *Book) prepare(sql string, kind EventKind, tenant string, ids []string, holder string, note budget.Note) (*Prepared, error) {
	ids = slices.Clone(ids) // the caller may use its own again
	if err := checkIDs(tenant, holder, ids); err != nil {
		return nil, err
	}
	if err := checkNote("Note", note); err != nil {
		return nil, err
	}
	p := &Prepared{
		book: b, sql: sql, locks: Locks{Tenant: tenant, Holder: holder, IDs: ids}, kind: kind, note: note, wait: 4,
		args: []any{tenant, ids, issued(ids), holder, b.waitMS(), note.JSON(), b.channel()},
	}
	p.failed = func(err error) error { return failed(string(kind), err) }
	p.scan = func(row pgx.Row) ([]Hold, error) {
		var refusal []byte
		var holds [][]byte
		if err := row.Scan(&refusal, &holds); err != nil {
			return nil, p.failed(err)
		}
		if len(refusal) > 0 {
			return nil, refused(refusal)
		}
		return decodeAll(holds)
	}
	return p, nil
}

// decodeAll reads what a transition of several holds returned.
func decodeAll(rows [][]byte) ([]Hold, error) {
	holds := make([]Hold, len(rows))
	for i, row := range rows {
		if err := holds[i].decode(row); err != nil {
			return nil, err
		}
	}
	return holds, nil
}

package leases

import (
	"cmp"
	"context"
	"iter"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
)

// Lease is a lease, or a carved child.
type Lease struct {
	// No is the number of the lease.
	No int64 `json:"no"`

	// Scope is the scope that the units are leased from.
	Scope string `json:"scope"`

	// Mode is "rows" for a lease that commands spend from, and "memory" for one of Allow. A carved
	// child has "carved". A child on another cluster has "away" on the parent's cluster and
	// "received" on its own.
	Mode string `json:"mode"`

	// Owner names the process that has the lease.
	Owner string `json:"owner"`

	// Child is the carved child. It is "" for a lease.
	Child string `json:"child,omitempty"`

	// Granted are the units that the lease was opened with.
	Granted int64 `json:"granted"`

	// Spent are the units spent from the lease. While it is open, they are the ones on record.
	Spent int64 `json:"spent"`

	// OpenedAt is when the lease was opened.
	OpenedAt time.Time `json:"opened_at"`

	// EndsAt is when the lease ends by itself, unless it is settled before.
	EndsAt time.Time `json:"ends_at"`

	// SettledAt is when the lease was settled. It is zero while the lease is open.
	SettledAt time.Time `json:"settled_at,omitzero"`

	// SettledBy is the process that settled it: its Owner, or another one after EndsAt. It is ""
	// while the lease is open.
	SettledBy string `json:"settled_by,omitempty"`

	// OpenedSeq is the entry that holds the units of the lease.
	OpenedSeq int64 `json:"opened_seq"`

	// LastSeq is the last entry of the settlement, or 0.
	LastSeq int64 `json:"settled_seq,omitempty"`
}

// Times are JSON: as text they would be in the session's DateStyle.
const historySQL = `
select l.no, l.scope, case l.mode when 's' then 'rows' when 'm' then 'memory' when 'c' then 'carved' when 'r' then 'away' else 'received' end, l.owner, coalesce(l.child, ''), l.granted,
    coalesce(l.spent, (select pg_catalog.sum(s.amount) from metered.lease_spends s where s.lease = l.no), 0)::bigint,
    pg_catalog.to_json(l.opened_at), pg_catalog.to_json(l.ends_at), pg_catalog.to_json(l.settled_at), coalesce(l.settled_by, ''), l.opened_seq, coalesce(l.settled_seq, 0)
from metered.leases l where l.scope = $1 and l.no < $2 order by l.no desc limit $3`

// History yields the leases of a scope, newest first.
func (p *Pool) History(ctx context.Context, db budget.Querier, scope string) iter.Seq2[Lease, error] {
	return func(yield func(Lease, error) bool) {
		if err := cmp.Or(p.usable(), notNil("db", db)); err != nil {
			yield(Lease{}, err)
			return
		}
		pages(ctx, db, p.sql.history, scope, int64(math.MaxInt64), yield,
			func(row pgx.CollectableRow) (l Lease, at int64, err error) {
				var settled *time.Time
				err = row.Scan(&l.No, &l.Scope, &l.Mode, &l.Owner, &l.Child, &l.Granted, &l.Spent,
					&l.OpenedAt, &l.EndsAt, &settled, &l.SettledBy, &l.OpenedSeq, &l.LastSeq)
				if settled != nil {
					l.SettledAt = *settled
				}
				return l, l.No, err
			})
	}
}

// Spend is a charge from a lease.
type Spend struct {
	// Lease is the number of the lease.
	Lease int64 `json:"lease"`

	// Offset is where the range of its units begins in the lease, from 0 on.
	Offset int64 `json:"offset"`

	// Amount are the units that were spent.
	Amount int64 `json:"amount"`

	// At is the time of the spend.
	At time.Time `json:"at"`

	// OperationTenant is the tenant of the command that spent the units.
	OperationTenant string `json:"operation_tenant,omitempty"`

	// Operation is the id of the command that spent the units, or "".
	Operation string `json:"operation,omitempty"`

	// Note is the caller's note of the charge.
	Note budget.Note `json:"note,omitzero"`
}

const spendsSQL = `
select s.lease, s.at_offset, s.amount, pg_catalog.to_json(s.at), coalesce(s.operation_tenant, ''), coalesce(s.operation, ''),
    coalesce(s.note ->> 'actor'::text, ''), coalesce(s.note ->> 'tenant'::text, ''), coalesce(s.note ->> 'correlation'::text, ''), coalesce(s.note ->> 'reason'::text, ''), coalesce(s.note ->> 'use'::text, '')
from metered.lease_spends s where s.lease = $1 and s.at_offset > $2 order by s.at_offset limit $3`

// Spends yields the spends from a lease.
func (p *Pool) Spends(ctx context.Context, db budget.Querier, lease int64) iter.Seq2[Spend, error] {
	return func(yield func(Spend, error) bool) {
		if err := cmp.Or(p.usable(), notNil("db", db)); err != nil {
			yield(Spend{}, err)
			return
		}
		pages(ctx, db, p.sql.spends, lease, -1, yield,
			func(row pgx.CollectableRow) (s Spend, at int64, err error) {
				err = row.Scan(&s.Lease, &s.Offset, &s.Amount, &s.At, &s.OperationTenant, &s.Operation,
					&s.Note.Actor, &s.Note.Tenant, &s.Note.Correlation, &s.Note.Reason, &s.Note.Use)
				return s, s.Offset, err
			})
	}
}

// pages yields rows page by page. scan also returns where the next page begins.
func pages[R any](ctx context.Context, db budget.Querier, sql string, of any, from int64,
	yield func(R, error) bool, scan func(pgx.CollectableRow) (R, int64, error)) {
	const page = 500
	for n := page; n == page; {
		// Planned for each page: a plan kept from when there was little reads all of it.
		rows, err := answer.Query(ctx, db, sql, pgx.QueryExecModeExec, of, from, page)
		var found []R
		if err == nil {
			found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (r R, err error) {
				r, from, err = scan(row)
				return r, err
			})
		}
		for _, r := range found {
			if !yield(r, nil) {
				return
			}
		}
		if err != nil {
			var none R
			yield(none, failed("history", err))
			return
		}
		n = len(found)
	}
}

package budget

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
)

// Query asks for the use of a scope in a Window, a Period, or else its lifetime.
type Query struct {
	// Scope is the scope to ask about.
	Scope string

	// Window asks for the units of this much time until now. Set Window or Period, or neither for
	// the lifetime.
	Window time.Duration

	// Period asks for the units since the present period began.
	Period Period
}

// Usage is the use of a scope. Other fields are as in a Standing, JSON is as of a Limit.
type Usage struct {
	Query `json:"-"`

	// Used are the units that count in the window or period, without held ones. It is negative where
	// credit is left.
	Used int64 `json:"used"`

	// Held are the units of open holds, without those of leases.
	Held int64 `json:"held"`

	// Leased are the units of open leases that are not spent yet.
	Leased int64 `json:"leased,omitempty"`

	// HoldDue is the time until an open hold may fall due, if Held is more than 0.
	HoldDue time.Duration `json:"-"`

	// Spent are the units that were charged over the lifetime.
	Spent int64 `json:"spent"`

	// Refunded are the units that were given back over the lifetime.
	Refunded int64 `json:"refunded"`

	// Credited are the units that were credited over the lifetime, without what lapsed.
	Credited int64 `json:"credited"`

	// Seq is the number of the scope's last entry, or 0 if it has none.
	Seq int64 `json:"seq"`

	// PeriodStart is as in a Standing.
	PeriodStart time.Time `json:"period_start,omitzero"`

	// PeriodEnd is as in a Standing.
	PeriodEnd time.Time `json:"period_end,omitzero"`

	// Charges is how many charges were made in the window, refunded ones included. A capture that
	// spends units is one, with its excess; a credit, a refund and a hold are none. What was spent
	// from memory of one slice of a lease, or by one carved child, is one, once it is settled.
	// Entries of version 1 of the schema are not counted.
	Charges int64 `json:"charges"`
}

// Available is the most that a limit of max still admits: for 0 the prepaid credit left.
func (u Usage) Available(max int64) int64 { return available(max, u.Used, u.Held+u.Leased) }

const usageSQL = `
select used, held, spent, refunded, credited, seq, due_us, leased, starts_at, ends_at, charges
from metered.usage_of($1::text[], $2::interval[], $3::metered.period[], true)`

// Usage returns the use of up to 1,024 scopes, from one snapshot.
func (l *Ledger) Usage(ctx context.Context, db Querier, queries ...Query) ([]Usage, error) {
	if err := cmp.Or(l.made(), notNil("db", db)); err != nil {
		return nil, err
	}
	if len(queries) == 0 || len(queries) > bounds.MaxQueries {
		return nil, invalid("queries", "are %d, want 1 to %d", len(queries), bounds.MaxQueries)
	}
	scopes := make([]string, len(queries))
	windows := make([]pgtype.Interval, len(queries))
	periods := make([]ledger.Period, len(queries))
	for i, q := range queries {
		if err := checkScope(index("queries", i, ".Scope"), q.Scope); err != nil {
			return nil, err
		}
		switch {
		case !q.Period.IsZero():
			if q.Window != 0 {
				return nil, invalid(index("queries", i, ".Period"), "and a Window exclude each other")
			}
			if err := q.Period.check(index("queries", i, ".Period")); err != nil {
				return nil, err
			}
			scopes[i], periods[i] = q.Scope, q.Period.sent() // with a window of null
			continue
		case q.Window != 0:
			if err := checkWindow(index("queries", i, ".Window"), q.Window); err != nil {
				return nil, err
			}
		}
		scopes[i], windows[i] = q.Scope, interval(q.Window)
	}
	rows, err := answer.Query(ctx, db, l.sql.usage, scopes, windows, ledger.AllPeriods(periods))
	if err != nil {
		return nil, failed("usage", err)
	}
	i := 0
	usages, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Usage, error) {
		u := Usage{Query: queries[i]}
		i++
		var due *int64
		var start, end *time.Time
		err := row.Scan(&u.Used, &u.Held, &u.Spent, &u.Refunded, &u.Credited, &u.Seq, &due,
			&u.Leased, &start, &end, &u.Charges)
		if start != nil && end != nil {
			u.PeriodStart, u.PeriodEnd = start.UTC(), end.UTC()
		}
		if due != nil {
			u.HoldDue = max(0, time.Duration(*due)*time.Microsecond)
		}
		return u, err
	})
	return usages, failed("usage", err)
}

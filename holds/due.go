package holds

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
)

// A zero field selects all, except Tenant.
type DueFilter struct {
	// Tenant selects the holds of this tenant, unless AllTenants is set.
	Tenant string

	// AllTenants selects the holds of all tenants, in place of Tenant.
	AllTenants bool

	// ScopePrefix selects holds with a line whose scope begins so.
	ScopePrefix string

	// State is Held for holds that fall due next, or Expired for holds that are due and not swept.
	State State

	// Before selects holds that are due before this time.
	Before time.Time

	// After goes on behind the page before: its Page.Next.
	After string

	// Max is the size of a page, from 1 to 1,000. Defaults to 100.
	Max int
}

const dueSQL = `
select holds, last_due, last_no
from metered.due_holds($1::text, $2::text, coalesce($3::timestamptz, '-infinity'), $4::bigint, coalesce($5::timestamptz, 'infinity'), $6::timestamptz, $7::int)`

// Due returns held holds, and expired ones that were not swept, in the order in which they fall
// due. A page may be empty and have a Next.
func (b *Book) Due(ctx context.Context, db budget.Querier, f DueFilter) (Page, error) {
	if err := cmp.Or(b.made(), notNil("db", db)); err != nil {
		return Page{}, err
	}
	after, afterNo, err := f.check()
	if err != nil {
		return Page{}, err
	}
	var now time.Time
	if err := answer.QueryRow(ctx, db, b.schema.SQL(`select metered.clock()`)).Scan(&now); err != nil {
		return Page{}, failed("due", err)
	}
	var before *time.Time
	if !f.Before.IsZero() {
		before = &f.Before
	}
	if f.State == Held && (after == nil || after.Before(now)) { // due after now
		after, afterNo = &now, math.MaxInt64
	}
	if end := now.Add(time.Microsecond); f.State == Expired && (before == nil || before.After(end)) {
		before = &end
	}
	var tenant *string
	if !f.AllTenants {
		tenant = &f.Tenant
	}
	var rows [][]byte
	var lastDue *time.Time
	var lastNo *int64
	err = answer.QueryRow(ctx, db, b.sql.due, tenant, f.ScopePrefix, after, afterNo, before, now,
		f.Max).Scan(&rows, &lastDue, &lastNo)
	if err != nil {
		return Page{}, failed("due", err)
	}
	var list Page
	if list.Holds, err = decodeAll(rows); err == nil && lastDue != nil {
		list.Next = fmt.Sprintf("%d.%d", lastDue.UnixMicro(), *lastNo)
	}
	// A hold that ended by a clock that was ahead has expired, and is due next.
	list.Holds = slices.DeleteFunc(list.Holds, func(h Hold) bool { return f.State != "" && h.State != f.State })
	return list, err
}

// check validates a filter and sets its defaults. It returns where the page begins, nil for the
// first.
func (f *DueFilter) check() (after *time.Time, no int64, err error) {
	if err := cmp.Or(checkNames(f.Tenant, ""), checkText("DueFilter.ScopePrefix", f.ScopePrefix)); err != nil {
		return nil, 0, err
	}
	if f.State != "" && f.State != Held && f.State != Expired {
		return nil, 0, invalid("DueFilter.State", "%q is neither Held nor Expired", f.State)
	}
	if f.After != "" {
		var us int64
		if _, err := fmt.Sscanf(f.After, "%d.%d", &us, &no); err != nil ||
			fmt.Sprintf("%d.%d", us, no) != f.After {
			return nil, 0, invalid("DueFilter.After", "%q is not a Page.Next of Due", f.After)
		}
		at := time.UnixMicro(us)
		after = &at
	}
	f.Max, err = pageSize("DueFilter.Max", f.Max)
	return after, no, err
}

// pageSize is the size of a page, with its default.
func pageSize(field string, max int) (int, error) {
	if max == 0 {
		return defaultPage, nil
	}
	if max < 1 || max > bounds.MaxPage {
		return 0, invalid(field, "%d is not from 1 to %d", max, bounds.MaxPage)
	}
	return max, nil
}

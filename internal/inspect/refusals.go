package inspect

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Refusal counts the refusals of one kind.
type Refusal struct {
	Code  string    `json:"code"`            // as metered.Code has it
	Scope string    `json:"scope,omitempty"` // of a refusal by a limit: the refusing scope
	Limit string    `json:"limit,omitempty"` // the limit: its name, or else its form
	Name  string    `json:"name,omitempty"`  // of the commands
	Count int64     `json:"count"`
	Last  time.Time `json:"last"`
	// Tenant and ID name the newest of these operations.
	Tenant string `json:"tenant,omitempty"`
	ID     string `json:"id"`
}

// RefusalList is the refusals on record.
type RefusalList struct {
	Now      time.Time     `json:"now"`
	Within   time.Duration `json:"within_ns"`
	Refusals []Refusal     `json:"refusals"` // most frequent first
	Looked   int           `json:"looked"`   // so many records were looked at
	Whole    bool          `json:"whole"`    // all records of that time were looked at
}

// Refusals counts the refusals on record, within the time before now.
//
// The database has only refusals of commands with metered.Command.RecordRefusal. Any other is
// rolled back and leaves nothing behind: the application counts those (metered.Config.OnRefusal, or
// the observer). A metered.CommandNotice is about a commit, and never about a refusal.
func (r *Reader) Refusals(ctx context.Context, within time.Duration, limit int) (RefusalList, error) {
	limit, err := pageSize(limit)
	if err == nil && (within < time.Second || within > 366*24*time.Hour) {
		err = invalid("within", "%v is not from 1s to a year", within)
	}
	if err != nil {
		return RefusalList{}, err
	}
	list := RefusalList{Within: within}
	if list.Now, err = r.now(ctx); err != nil {
		return RefusalList{}, err
	}
	since := list.Now.Add(-within)
	if err := r.row(ctx, lookedSQL, since, MaxLooked).Scan(&list.Looked); err != nil {
		return RefusalList{}, failed("refusals", err)
	}
	list.Whole = list.Looked < MaxLooked
	list.Refusals, err = collect(ctx, r, refusalsSQL, func(row pgx.CollectableRow) (d Refusal, err error) {
		var limit []byte
		if err := row.Scan(&d.Code, &d.Name, &limit, &d.Scope, &d.Count, &d.Last, &d.Tenant, &d.ID); err != nil {
			return d, err
		}
		d.Last = d.Last.UTC()
		if limit != nil {
			var l budget.Limit
			if err = json.Unmarshal(limit, &l); err == nil {
				d.Limit = label(l)
			}
		}
		return d, err
	}, since, MaxLooked, limit)
	return list, failed("refusals", err)
}

// label is the name of a limit, or how it reads.
func label(l budget.Limit) string {
	switch {
	case l.Name != "":
		return l.Name
	case l.Prepaid:
		return fmt.Sprintf("credit line %d", l.Max)
	case l.Lifetime:
		return fmt.Sprintf("lifetime %d", l.Max)
	case !l.Period.IsZero():
		return fmt.Sprintf("%d per %v", l.Max, l.Period)
	}
	return fmt.Sprintf("%d per %v", l.Max, l.Window)
}

const lookedSQL = `
select count(*) from (select from metered.operations_words o where o.at > $1 order by o.at desc limit $2) x`

// A refusal by several limits counts for each of them.
const refusalsSQL = `
select x.refusal_code, coalesce(x.name, ''), l.this::text, coalesce(l.scope, ''), count(*), pg_catalog.max(x.at),
    (pg_catalog.array_agg(x.tenant order by x.at desc, x.id))[1], (pg_catalog.array_agg(x.id order by x.at desc, x.id))[1]
from (select o.at, o.tenant, o.id, o.name, o.refusal_code, o.refusal_limits
      from metered.operations_words o where o.at > $1 order by o.at desc limit $2) x
    left join lateral (
        select (e.refusal -> 'limit'::text)::jsonb as this, e.refusal ->> 'scope'::text as scope from pg_catalog.json_array_elements(
            case when pg_catalog.json_typeof(x.refusal_limits) = 'array' then x.refusal_limits end) e(refusal)) l on true
where x.refusal_code is not null
group by 1, 2, 3, 4 order by 5 desc, 1, 2, 3, 4 limit $3`

package inspect

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/leases"
)

// LeaseState selects leases.
type LeaseState string

const (
	LeaseOut     LeaseState = "out"   // open, and its time is not over
	LeaseEnded   LeaseState = "ended" // its time is over, and it is not settled
	LeaseOpen    LeaseState = "open"  // both of these
	LeaseSettled LeaseState = "settled"
)

// LeaseFilter selects leases. A zero field selects all. A lease must match every other field.
type LeaseFilter struct {
	Scope string
	State LeaseState
	After string // continues a list: LeaseList.Next of the page before
	Limit int    // the size of a page, 1 to MaxPage. Defaults to DefaultPage
}

// LeaseList is a page of leases.
type LeaseList struct {
	Leases []leases.Lease `json:"leases"`
	Next   string         `json:"next,omitempty"` // continues the list, "" at its end
}

// Leases lists leases: those that are open (Out, Ended, Open) in the order in which they end; all
// others newest first. Of those, a page looks at MaxLooked leases: it may be empty and have a Next.
func (r *Reader) Leases(ctx context.Context, f LeaseFilter) (LeaseList, error) {
	limit, err := pageSize(f.Limit)
	if err := cmp.Or(err, checkText("LeaseFilter.Scope", f.Scope)); err != nil {
		return LeaseList{}, err
	}
	switch f.State {
	case "", LeaseOut, LeaseEnded, LeaseOpen, LeaseSettled:
	default:
		return LeaseList{}, invalid("LeaseFilter.State", "%q is not a state", f.State)
	}
	if f.State == "" || f.State == LeaseSettled {
		return r.newestLeases(ctx, f, limit)
	}
	var us, no int64
	if f.After != "" {
		if _, err := fmt.Sscanf(f.After, "%d.%d", &us, &no); err != nil {
			return LeaseList{}, invalid("LeaseFilter.After", "%q is not a LeaseList.Next", f.After)
		}
	}
	sql := openLeasesSQL
	args := []any{time.UnixMicro(us), no, f.State, limit}
	if f.Scope != "" {
		sql, args = openLeasesOfSQL, append(args, f.Scope)
	}
	list, err := collect(ctx, r, sql, scanLease, args...)
	if err != nil || len(list) < limit {
		return LeaseList{Leases: list}, failed("leases", err)
	}
	last := list[limit-1]
	return LeaseList{list, fmt.Sprintf("%d.%d", last.EndsAt.UnixMicro(), last.No)}, nil
}

const leaseColumns = `
select l.no, l.scope, case l.mode when 's' then 'rows' when 'm' then 'memory' when 'c' then 'carved' when 'r' then 'away' else 'received' end,
    l.owner, coalesce(l.child, ''), l.granted,
    coalesce(l.spent, (select pg_catalog.sum(s.amount) from metered.lease_spends s where s.lease = l.no), 0)::bigint,
    l.opened_at, l.ends_at, l.settled_at, coalesce(l.settled_by, ''), l.opened_seq, coalesce(l.settled_seq, 0)`

// These go by the indexes of what is open, by scope or not.
const (
	openLeasesSQL = leaseColumns + `
from (select metered.clock() as now offset 0) c, metered.leases l
where l.settled_at is null and l.ends_at >= $1 and (l.ends_at > $1 or l.no > $2)
  and ($3::text = 'open' or ($3::text = 'out') = (l.ends_at > c.now))` + openLeasesEnd
	openLeasesOfSQL = leaseColumns + `
from (select metered.clock() as now offset 0) c, metered.leases l
where l.settled_at is null and l.scope = $5 and l.ends_at >= $1 and (l.ends_at > $1 or l.no > $2)
  and ($3::text = 'open' or ($3::text = 'out') = (l.ends_at > c.now))` + openLeasesEnd
	openLeasesEnd = `
order by l.ends_at, l.no limit $4`
)

const (
	leasesSQL = leaseColumns + `
from (select * from metered.leases x where x.no < $1 order by x.no desc limit $2) l
where ($3::text = '' or l.settled_at is not null)
limit $4`
	leasesOfSQL = leaseColumns + `
from (select * from metered.leases x where x.scope = $5 and x.no < $1 order by x.no desc limit $2) l
where ($3::text = '' or l.settled_at is not null)
limit $4`
	leasesEndSQL = `
select coalesce((select x.no from metered.leases x where x.no < $1 order by x.no desc offset $2::bigint - 1 limit 1), 0)`
	leasesOfEndSQL = `
select coalesce((select x.no from metered.leases x where x.scope = $3 and x.no < $1 order by x.no desc offset $2::bigint - 1 limit 1), 0)`
)

func (r *Reader) newestLeases(ctx context.Context, f LeaseFilter, limit int) (LeaseList, error) {
	before := int64(math.MaxInt64)
	if f.After != "" {
		var err error
		if before, err = strconv.ParseInt(f.After, 10, 64); err != nil {
			return LeaseList{}, invalid("LeaseFilter.After", "%q is not a LeaseList.Next", f.After)
		}
	}
	sql, end := leasesSQL, leasesEndSQL
	args, endArgs := []any{before, MaxLooked, f.State, limit}, []any{before, MaxLooked}
	if f.Scope != "" {
		sql, end = leasesOfSQL, leasesOfEndSQL
		args, endArgs = append(args, f.Scope), append(endArgs, f.Scope)
	}
	list, err := collect(ctx, r, sql, scanLease, args...)
	if err != nil {
		return LeaseList{}, failed("leases", err)
	}
	var no int64
	if len(list) == limit {
		no = list[limit-1].No
	} else if err := r.row(ctx, end, endArgs...).Scan(&no); err != nil {
		return LeaseList{}, failed("leases", err)
	}
	page := LeaseList{Leases: list}
	if no > 0 {
		page.Next = fmt.Sprint(no)
	}
	return page, nil
}

func scanLease(row pgx.CollectableRow) (l leases.Lease, err error) {
	var settled *time.Time
	err = row.Scan(&l.No, &l.Scope, &l.Mode, &l.Owner, &l.Child, &l.Granted, &l.Spent, &l.OpenedAt, &l.EndsAt, &settled,
		&l.SettledBy, &l.OpenedSeq, &l.LastSeq)
	l.OpenedAt, l.EndsAt, l.SettledAt = l.OpenedAt.UTC(), l.EndsAt.UTC(), moment(settled)
	return l, err
}

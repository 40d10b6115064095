package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Scope is the state of a scope by its last entry: Held includes due holds that are not swept, and
// units out on leases. Ledger.Usage has the exact state.
type Scope struct {
	Scope    string    `json:"scope"`
	Seq      int64     `json:"seq"` // the number of its last entry: how many were ever made
	Last     time.Time `json:"last"`
	Spent    int64     `json:"spent"`
	Refunded int64     `json:"refunded"`
	Credited int64     `json:"credited"`
	Used     int64     `json:"used"` // Spent - Refunded - Credited
	Held     int64     `json:"held"`
	Epoch    int       `json:"epoch"`            // clock repairs so far
	Closed   bool      `json:"closed,omitempty"` // it was carved from another, and nothing new is let in
	Lots     bool      `json:"lots,omitempty"`   // it is a wallet: its credit is in lots, and it has -Used - Held units
	Told     []Told    `json:"told,omitempty"`   // the thresholds that were reached, by name

	idle time.Duration // since the last charge in the chain, or 0 where a charge is not in it yet
}

// Net is the number of units charged, less refunds.
func (s Scope) Net() int64 { return s.Spent - s.Refunded }

// Left is the credit that nothing holds, as of the last entry; less than 0 where it is overdrawn.
func (s Scope) Left() int64 { return s.Credited - s.Net() - s.Held }

// ScopeList is a page of scopes, by name.
type ScopeList struct {
	Scopes []Scope `json:"scopes"`
	Next   string  `json:"next,omitempty"` // continues the list, as after, "" at its end
}

// ScopeKind restricts a list of scopes.
type ScopeKind string

// Kinds of scopes.
const (
	Wallets ScopeKind = "wallets" // with lots
	Planned ScopeKind = "planned" // wallets with a plan
	Reached ScopeKind = "reached" // with a threshold that was reported, and is not armed again
)

// ScopeFilter restricts a list of scopes.
type ScopeFilter struct {
	Prefix string // names begin with it
	After  string // names come after it
	Kind   ScopeKind
	Plan   PlanNames // of Planned, "" for all
	Limit  int
}

// scopesLooked is the number of scopes that a page of a kind looks at.
const scopesLooked = 2000

// Scopes lists the scopes that have entries, in the order of the bytes of their names. With a Kind,
// a page looks at a bounded number of scopes, and may have none though Next is not empty.
func (r *Reader) Scopes(ctx context.Context, f ScopeFilter) (ScopeList, error) {
	limit, err := pageSize(f.Limit)
	if err := cmp.Or(err, checkText("prefix", f.Prefix), checkText("after", f.After), checkText("plan", string(f.Plan))); err != nil {
		return ScopeList{}, err
	}
	looked := limit + 1
	switch f.Kind {
	case "":
	case Wallets, Planned, Reached:
		looked = scopesLooked
	default:
		return ScopeList{}, invalid("kind", "%q is none of wallets, planned and reached", f.Kind)
	}
	plan, whole := cmp.Or(f.Plan, "*").args()
	scopes, err := collect(ctx, r, scopesSQL, scanScope, f.Prefix, f.After, limit+1, looked, string(f.Kind), plan, whole)
	if err != nil {
		return ScopeList{}, failed("scopes", err)
	}
	list := ScopeList{Scopes: scopes}
	if len(scopes) > limit {
		list.Scopes, list.Next = scopes[:limit], scopes[limit-1].Scope
	} else if f.Kind != "" {
		err = r.row(ctx, lastLookedSQL, f.Prefix, f.After, looked).Scan(&list.Next)
	}
	if f.Kind == Reached { // a period may be over since, which arms its thresholds
		list.Scopes = slices.DeleteFunc(list.Scopes, func(s Scope) bool { return len(s.Told) == 0 })
	}
	return list, failed("scopes", err)
}

// skipSQL are the scopes from the first one after $2 on that begins with $1, by skipping from one
// to the next in the primary key.
const skipSQL = `
with recursive s as (
    (select l.scope from metered.ledger l where l.scope > $2 and l.scope >= $1 order by l.scope limit 1)
    union all
    select (select l.scope from metered.ledger l where l.scope > s.scope order by l.scope limit 1)
    from s where pg_catalog.starts_with(s.scope, $1)
)`

const scopeColumns = `
    t.seq, t.at, t.spent, t.refunded, t.credited, t.held, t.epoch, coalesce(t.next_due = '-infinity', false), t.lots_end is not null`

// lastEntry counts charges that are not in the chain yet (tallies) as spent.
const lastEntry = `lateral (
    select l.seq, l.at, l.spent + case when l.tallied then coalesce((
        select pg_catalog.sum(x.amount) from metered.tallies x where x.scope = l.scope), 0)::bigint else 0 end as spent, l.refunded, l.credited, l.held, l.epoch, l.next_due, l.lots_end, l.crossed, l.tallied
    from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) t`

const scopesSQL = skipSQL + `
select s.scope,` + scopeColumns + `, t.crossed, metered.clock(), coalesce(t.tallied, false)
from (select x.scope from s x where pg_catalog.starts_with(x.scope, $1) limit $4) s, ` + lastEntry + `
where case $5::text when 'wallets' then t.lots_end is not null when 'reached' then t.crossed is not null
    when 'planned' then t.lots_end is not null and exists (
        select from (select metered.clock() as now offset 0) c, (select s.scope offset 0) w, ` + plansOf + ` where ` + named + `)
    else true end limit $3`

// lastLookedSQL is the last scope that a page looked at, or ” if the list ends there.
const lastLookedSQL = skipSQL + `
select case when count(*) = $3 then pg_catalog.max(x.scope) else '' end
from (select y.scope from s y where pg_catalog.starts_with(y.scope, $1) limit $3) x`

func (s *Scope) dest() []any {
	return []any{&s.Scope, &s.Seq, &s.Last, &s.Spent, &s.Refunded, &s.Credited, &s.Held, &s.Epoch, &s.Closed, &s.Lots}
}

func (s *Scope) scanned() {
	s.Last, s.Used = s.Last.UTC(), s.Spent-s.Refunded-s.Credited
}

func scanScope(row pgx.CollectableRow) (s Scope, err error) {
	var crossed []byte
	var now time.Time
	var tallied bool
	if err = row.Scan(append(s.dest(), &crossed, &now, &tallied)...); err != nil {
		return s, err
	}
	if s.scanned(); !tallied {
		s.idle = max(0, now.Sub(s.Last))
	}
	s.Told, err = toldOf(crossed, now)
	return s, err
}

// ScopeDetail is all there is to know of a scope.
type ScopeDetail struct {
	Scope
	Now         time.Time     `json:"now"`
	First       time.Time     `json:"first"`             // when its first entry was made
	Leased      int64         `json:"leased"`            // units that open leases keep and have not spent
	HeldNow     int64         `json:"held_now"`          // units of open holds that are not due, without leases
	HoldDue     time.Time     `json:"hold_due,omitzero"` // when an open hold may fall due, if HeldNow > 0
	Purged      bool          `json:"purged,omitempty"`  // entries after the first are gone
	Created     time.Time     `json:"created,omitzero"`  // when it was declared (Ledger.Create), zero if it was not
	Retired     time.Time     `json:"retired,omitzero"`
	Parent      string        `json:"parent,omitempty"` // the scope that it was carved from
	LockKey     int64         `json:"lock_key,string"`
	Rates       []Rate        `json:"rates"`   // of the last minute, hour and day
	Waiting     int           `json:"waiting"` // backends that wait for its lock now
	LongestWait time.Duration `json:"longest_wait_ns"`
	Wallet      *Wallet       `json:"wallet,omitempty"`     // nil if it is none
	Sessions    int           `json:"sessions"`             // open ones (metered.Open), of the MaxLooked holds of it that fall due first
	SessionDue  time.Time     `json:"session_due,omitzero"` // when the first of them is over, unless it is renewed
}

// Rate is the recent entries of a scope.
type Rate struct {
	Within  time.Duration `json:"within_ns"`
	Entries int64         `json:"entries"`
	Units   int64         `json:"units"` // charged, refunds not taken off
	// Purged: entries of this time were purged, and are not counted.
	Purged bool `json:"purged,omitempty"`
}

// Scope returns the state of one scope, or ErrUnknown if it has no entries and was never declared.
func (r *Reader) Scope(ctx context.Context, name string) (ScopeDetail, error) {
	if name == "" {
		return ScopeDetail{}, invalid("name", "is empty")
	}
	if err := checkText("name", name); err != nil {
		return ScopeDetail{}, err
	}
	d := ScopeDetail{Scope: Scope{Scope: name}, LockKey: r.scopeKey(name)}
	found, err := collect(ctx, r, scopeSQL, func(row pgx.CollectableRow) (_ struct{}, err error) {
		var created, retired *time.Time
		var crossed []byte
		if err := row.Scan(append(d.Scope.dest(), &d.Now, &d.First, &d.Purged, &created, &retired, &d.Parent, &crossed)...); err != nil {
			return struct{}{}, err
		}
		d.scanned()
		d.Now, d.First = d.Now.UTC(), d.First.UTC()
		d.Created, d.Retired = moment(created), moment(retired)
		d.Told, err = toldOf(crossed, d.Now)
		return struct{}{}, err
	}, name)
	switch {
	case err != nil:
		return ScopeDetail{}, failed("scope", err)
	case len(found) == 0:
		return r.declared(ctx, d)
	}
	usage, err := r.Ledger.Usage(ctx, r.DB, budget.Query{Scope: name})
	if err != nil {
		return ScopeDetail{}, err
	}
	if d.HeldNow, d.Leased = usage[0].Held, usage[0].Leased; d.HeldNow > 0 {
		d.HoldDue = d.Now.Add(usage[0].HoldDue)
	}
	rates, err := r.rates(ctx, []string{name}, time.Minute, time.Hour, 24*time.Hour)
	if err != nil {
		return ScopeDetail{}, err
	}
	for _, rate := range rates {
		d.Rates = append(d.Rates, rate.Rate)
	}
	slices.SortFunc(d.Rates, func(a, b Rate) int { return cmp.Compare(a.Within, b.Within) })
	waits, err := r.waits(ctx)
	if d.Waiting, d.LongestWait = waits[d.LockKey].backends, waits[d.LockKey].longest; err != nil {
		return d, err
	}
	var due *time.Time
	if err := r.row(ctx, sessionsSQL, name, MaxLooked).Scan(&d.Sessions, &due); err != nil {
		return d, failed("sessions", err)
	}
	if d.SessionDue = moment(due); d.Lots {
		d.Wallet, err = r.Wallet(ctx, name)
	}
	return d, err
}

const scopeSQL = `
select s.scope,` + scopeColumns + `, metered.clock(), f.at,
    t.seq > 16 and (select l.seq from metered.ledger l where l.scope = s.scope and l.seq = 2) is null,
    r.created_at, r.retired_at, coalesce((select p.scope from metered.leases p where p.child = s.scope and p.mode = 'c'), ''), t.crossed
from (select $1::text as scope) s cross join ` + lastEntry + `
    cross join lateral (select l.at from metered.ledger l where l.scope = s.scope order by l.seq limit 1) f
    left join metered.resources r on r.scope = s.scope`

// sessionsSQL goes by the index of open lines.
const sessionsSQL = `
select count(*), pg_catalog.min(h.due)
from (select metered.clock() as now offset 0) c, lateral (
    select l.hold from metered.hold_lines l
    where l.scope = $1 and l.open > 0 and l.due >= c.now order by l.due limit $2) x, lateral (
    select y.id, y.state, y.due from metered.holds y where y.no = x.hold limit 1) h
where h.state = 'h' and h.due > c.now and h.id ~ ` + sessionIDs

// Known is nil if a scope has entries or was declared, and else ErrUnknown.
func (r *Reader) Known(ctx context.Context, name string) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	var known bool
	err := r.row(ctx, knownSQL, name).Scan(&known)
	if err == nil && !known {
		return unknownScope(name)
	}
	return failed("scope", err)
}

const knownSQL = `
select (select l.seq from metered.ledger l where l.scope = $1 limit 1) is not null
    or (select r.scope from metered.resources r where r.scope = $1) is not null`

func unknownScope(name string) error {
	return fmt.Errorf("%w: scope %q has no entries", ErrUnknown, name)
}

const declaredSQL = `
select metered.clock(), r.created_at, r.retired_at from metered.resources r where r.scope = $1`

// declared is a scope that has no entries.
func (r *Reader) declared(ctx context.Context, d ScopeDetail) (ScopeDetail, error) {
	var created, retired *time.Time
	err := r.row(ctx, declaredSQL, d.Scope.Scope).Scan(&d.Now, &created, &retired)
	if errors.Is(err, pgx.ErrNoRows) {
		return ScopeDetail{}, unknownScope(d.Scope.Scope)
	}
	d.Now, d.Created, d.Retired = d.Now.UTC(), moment(created), moment(retired)
	return d, failed("scope", err)
}

// moment is the time, or zero.
func moment(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}

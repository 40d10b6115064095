package inspect

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Hot is a scope that was written of late, or that somebody waits for.
type Hot struct {
	Scope   string        `json:"scope"`      // "" for a lock of none of the scopes that were looked at: another scope's, an operation's, a hold's, a lease's
	Key     int64         `json:"key,string"` // of its lock
	Entries int64         `json:"entries"`    // within HotList.Within
	Units   int64         `json:"units"`      // charged in that time
	PerSec  float64       `json:"entries_per_second"`
	UnitsPS float64       `json:"units_per_second"`
	Last    time.Time     `json:"last,omitzero"`   // when the last entry was made
	Waiting int           `json:"waiting"`         // backends that wait for the scope's lock now
	Longest time.Duration `json:"longest_wait_ns"` // how long the first of them has waited
}

// HotList are the hottest scopes.
type HotList struct {
	Now    time.Time     `json:"now"`
	Within time.Duration `json:"within_ns"` // the time looked at
	Scopes []Hot         `json:"scopes"`    // ordered by how many wait, then by entries
}

// Hot returns the scopes with most entries within the time before now, 1s to 24h, and those whose
// lock somebody waits for now: up to 200.
//
// The numbers of each scope are exact. The choice of scopes is not: they are those of the newest
// 5,000 records of operations, and of the ledger's last pages. A scope that is charged outside of
// commands alone can be missed where a purge has made room for new entries in older pages.
func (r *Reader) Hot(ctx context.Context, within time.Duration, limit int) (HotList, error) {
	limit, err := pageSize(limit)
	if err == nil && (within < time.Second || within > 24*time.Hour) {
		err = invalid("within", "%v is not from 1s to 24h", within)
	}
	if err != nil {
		return HotList{}, err
	}
	list := HotList{Within: within, Scopes: []Hot{}}
	if list.Now, err = r.now(ctx); err != nil {
		return HotList{}, err
	}
	since := list.Now.Add(-within)
	tail, err := r.tail(ctx)
	if err != nil {
		return HotList{}, err
	}
	candidates, err := collect(ctx, r, candidatesSQL, pgx.RowTo[string], since, tail, MaxLooked/2, candidates)
	if err != nil {
		return HotList{}, failed("hot", err)
	}
	waits, err := r.waits(ctx)
	if err != nil {
		return HotList{}, err
	}
	var looked []string // the first of them, and those that somebody waits for
	for i, scope := range candidates {
		if _, waited := waits[r.scopeKey(scope)]; waited || i < min(2*limit, maxHot) {
			looked = append(looked, scope)
		}
	}
	rates, err := r.rates(ctx, looked, within)
	if err != nil {
		return HotList{}, err
	}
	for _, rate := range rates {
		h := Hot{Scope: rate.scope, Key: r.scopeKey(rate.scope), Entries: rate.Entries, Units: rate.Units, Last: rate.last}
		h.PerSec, h.UnitsPS = float64(h.Entries)/within.Seconds(), float64(h.Units)/within.Seconds()
		w := waits[h.Key]
		h.Waiting, h.Longest = w.backends, w.longest
		delete(waits, h.Key)
		list.Scopes = append(list.Scopes, h)
	}
	for key, w := range waits {
		list.Scopes = append(list.Scopes, Hot{Key: key, Waiting: w.backends, Longest: w.longest})
	}
	slices.SortFunc(list.Scopes, func(a, b Hot) int {
		return cmp.Or(cmp.Compare(b.Waiting, a.Waiting), cmp.Compare(b.Entries, a.Entries), cmp.Compare(a.Scope, b.Scope))
	})
	list.Scopes = list.Scopes[:min(limit, len(list.Scopes))]
	return list, nil
}

// maxHot is how many scopes are measured. With more of them the planner would have the statement
// compiled (jit).
const maxHot = 200

// candidates is how many scopes may be the hottest.
const candidates = 1000

// candidatesSQL are the scopes that occur most in the newest records and in the last pages of the
// ledger. The records have an index, the pages are read by their address.
const candidatesSQL = `
select c.scope
from (select u.scope from (
          select o.scopes from metered.operations_words o where o.at > $1 order by o.at desc limit $3) o,
          lateral pg_catalog.unnest(o.scopes) u(scope)
      union all
      select l.scope from metered.ledger l where l.ctid >= $2::text::tid and l.at > $1) c
group by c.scope order by count(*) desc, c.scope limit $4`

// rate is a Rate of a scope.
type rate struct {
	Rate
	scope string
	last  time.Time
}

// ratesSQL finds the last entry before a time, for each scope and length of time, as metered._base
// does: by the index of every sixteenth entry, and the fifteen after it. The difference of two
// entries is the amount written since. If a purge took that entry, the first that is left takes its
// place. Charges that are not in the chain yet (tallies) are young, and count. Without the limit the
// planner expects a thousand epochs, and compiles (jit).
const ratesSQL = `
select s.scope, (extract(epoch from w.within) * 1e6)::bigint, t.at,
    t.seq - coalesce(m.seq, b.seq, 0), t.spent - coalesce(m.spent, b.spent, 0), m.seq is not null
from pg_catalog.unnest($1::text[]) s(scope)
cross join pg_catalog.unnest($2::interval[]) w(within)
cross join (select metered.clock() as now offset 0) c
cross join lateral (
    select l.seq + y.made as seq, l.spent + y.units as spent, l.at, l.epoch
    from (select l.seq, l.spent, l.at, l.epoch, l.tallied from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) l,
         lateral (select count(*) as made, coalesce(pg_catalog.sum(x.amount), 0)::bigint as units
          from metered.tallies x where l.tallied and x.scope = s.scope) y) t
left join lateral (
    select b.seq, b.spent
    from (select pg_catalog.generate_series(greatest(0, t.epoch - 15), t.epoch::int) limit 16) g(e),
         lateral (select l.seq from metered.ledger l
          where l.scope = s.scope and l.epoch = g.e and l.at <= c.now - w.within and (l.seq & 15::bigint = 1 or l.kind = 'k')
          order by l.at desc, l.seq desc limit 1) k,
         lateral (select l.seq, l.spent from metered.ledger l
          where l.scope = s.scope and l.seq between k.seq and k.seq + 15 and l.epoch = g.e and l.at <= c.now - w.within
          order by l.seq desc limit 1) b
    order by g.e desc limit 1) b on true
left join lateral (
    select l.seq, l.spent from metered.ledger l
    where coalesce(b.seq, 0) <= 1 and t.seq > 16 and l.scope = s.scope and l.seq > 1 order by l.seq limit 1) m on m.seq > 2`

// rates are of each scope that has entries.
func (r *Reader) rates(ctx context.Context, scopes []string, within ...time.Duration) ([]rate, error) {
	lengths := make([]pgtype.Interval, len(within))
	for i, d := range within {
		lengths[i] = pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
	}
	rates, err := collect(ctx, r, ratesSQL, func(row pgx.CollectableRow) (f rate, err error) {
		var us int64
		err = row.Scan(&f.scope, &us, &f.last, &f.Entries, &f.Units, &f.Purged)
		f.Within, f.last = time.Duration(us)*time.Microsecond, f.last.UTC()
		return f, err
	}, scopes, lengths)
	return rates, failed("rates", err)
}

// wait is how many wait for a lock, and how long the first of them has.
type wait struct {
	backends int
	longest  time.Duration
}

// waitsSQL has the key of the lock from its halves. waitstart is by the server's clock, and null
// for an instant.
const waitsSQL = `
select l.classid::bigint << 32 | l.objid::bigint, count(*),
    coalesce(extract(epoch from pg_catalog.max(pg_catalog.clock_timestamp() - l.waitstart)) * 1e6, 0)::bigint
from pg_catalog.pg_locks l
where l.locktype = 'advisory' and l.objsubid = 1 and not l.granted
  and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
group by 1`

// waits are by the key of the lock.
func (r *Reader) waits(ctx context.Context) (map[int64]wait, error) {
	all := make(map[int64]wait)
	_, err := collect(ctx, r, waitsSQL, func(row pgx.CollectableRow) (struct{}, error) {
		var key, us int64
		var n int
		err := row.Scan(&key, &n, &us)
		all[key] = wait{n, max(0, time.Duration(us)*time.Microsecond)}
		return struct{}{}, err
	})
	return all, failed("locks", err)
}

package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Count is a number of rows, and how it was found.
type Count struct {
	N    int64     `json:"n"`
	Kind CountKind `json:"kind"`
}

// CountKind says how a Count was found.
type CountKind string

const (
	Exact     CountKind = "exact"
	Estimated CountKind = "estimated" // from the planner's statistics, which ANALYZE and autovacuum make
	AtLeast   CountKind = "at least"  // counting ended at MaxLooked
	Unknown   CountKind = "unknown"   // the table is large, and was never analysed: N is 0
)

// Overview is the state of a schema on one screen.
type Overview struct {
	Now     time.Time `json:"now"` // the database's clock
	Version int       `json:"version"`
	Scopes  Count     `json:"scopes"`
	Entries Count     `json:"entries"`
	// Operations are the records kept. InFlight are the commands that run now, of which Waiting
	// wait for a lock.
	Operations Count `json:"operations"`
	InFlight   int   `json:"in_flight"`
	Waiting    int   `json:"waiting"`

	OpenHolds Count `json:"open_holds"` // held, and not due
	// Unswept holds have expired and were not announced. OldestDue is when the first of them fell
	// due, and SweepLag how long ago that was: zero if there is none.
	Unswept   Count         `json:"unswept"`
	OldestDue time.Time     `json:"oldest_due,omitzero"`
	SweepLag  time.Duration `json:"sweep_lag_ns"`
	NextDue   time.Time     `json:"next_due,omitzero"` // when the next open hold falls due

	LeasesOut   Count `json:"leases_out"`   // open, and their time is not over
	UnitsOut    int64 `json:"units_out"`    // granted to those that were counted
	LeasesEnded Count `json:"leases_ended"` // their time is over, and they are not settled: their units are out of reach
	// LotsDue have ended and were not swept, or their lapsed units were not reported. OldestLot is
	// when the first of them ended, and LotLag how long ago that was, both zero if there is none.
	LotsDue   Count         `json:"lots_due"`
	OldestLot time.Time     `json:"oldest_lot,omitzero"`
	LotLag    time.Duration `json:"lot_lag_ns"`
	// ClockAhead is how far the newest entry or record is ahead of the clock, of those that were
	// written last, 0 if it is not. Reader.ClockAhead looks at every scope.
	ClockAhead time.Duration `json:"clock_ahead_ns"`
}

// Counts end at a bound, and use partial indexes of open rows.
const overviewSQL = `
select n.clk, (select pg_catalog.max(v.version) from metered.schema_version v), u.n, u.first, o.n, o.first, w.n, w.units, e.n, d.n, d.first
from (select metered.clock() as clk offset 0) n,
    lateral (select count(*) as n, pg_catalog.min(x.due) as first from (
        select h.due from metered.holds h where h.pending and h.due <= n.clk order by h.due limit $1) x) u,
    lateral (select count(*) as n, pg_catalog.min(x.due) as first from (
        select h.due from metered.holds h where h.pending and h.due > n.clk order by h.due limit $1) x) o,
    lateral (select count(*) as n, coalesce(pg_catalog.sum(x.granted), 0)::bigint as units from (
        select l.granted from metered.leases l
        where l.settled_at is null and l.ends_at > n.clk and l.mode <> 'g' order by l.ends_at limit $1) x) w,
    lateral (select count(*) as n from (
        select from metered.leases l where l.settled_at is null and l.ends_at <= n.clk order by l.ends_at limit $1) x) e,
    lateral (select count(*) as n, pg_catalog.min(x.expires_at) as first from (
        select l.expires_at from metered.lots l where (l.open or l.untold > 0) and l.expires_at <= n.clk order by l.expires_at, l.no limit $1) x) d`

// inFlightSQL counts the transactions that have a lock of ours and have looked at operations, which
// a command does first and a look-up does without a lock. waitstart is by the server's clock.
const inFlightSQL = `
select count(*), count(*) filter (where p.waits)
from (
    select l.pid, pg_catalog.bool_or(not l.granted) as waits
    from pg_catalog.pg_locks l
    where l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
      and l.pid <> pg_catalog.pg_backend_pid()
      and (l.locktype = 'relation' and l.relation = 'metered.operations'::pg_catalog.regclass::oid
        or l.locktype = 'advisory' and l.objsubid = 1)
    group by l.pid
    having pg_catalog.bool_or(l.locktype = 'relation') and pg_catalog.bool_or(l.locktype = 'advisory')) p`

// Overview returns the state of the schema.
func (r *Reader) Overview(ctx context.Context) (Overview, error) {
	var o Overview
	var oldest, next, oldestLot *time.Time
	var unswept, open, out, ended, lots int64
	err := r.row(ctx, overviewSQL, MaxLooked).
		Scan(&o.Now, &o.Version, &unswept, &oldest, &open, &next, &out, &o.UnitsOut, &ended, &lots, &oldestLot)
	if err != nil {
		return Overview{}, failed("overview", err)
	}
	o.Unswept, o.OpenHolds, o.LeasesOut, o.LeasesEnded = bounded(unswept), bounded(open), bounded(out), bounded(ended)
	if oldest != nil {
		o.OldestDue, o.SweepLag = oldest.UTC(), o.Now.Sub(*oldest)
	}
	if o.LotsDue = bounded(lots); oldestLot != nil {
		o.OldestLot, o.LotLag = oldestLot.UTC(), o.Now.Sub(*oldestLot)
	}
	if next != nil {
		o.NextDue = next.UTC()
	}
	o.Now = o.Now.UTC()
	if err := r.row(ctx, inFlightSQL).Scan(&o.InFlight, &o.Waiting); err != nil {
		return Overview{}, failed("overview", err)
	}
	if o.Entries, err = r.rows(ctx, "ledger"); err != nil {
		return Overview{}, err
	}
	if o.Operations, err = r.rows(ctx, "operations"); err != nil {
		return Overview{}, err
	}
	if o.Scopes, err = r.scopes(ctx, o.Entries); err != nil {
		return Overview{}, err
	}
	o.ClockAhead, err = r.newestAhead(ctx)
	return o, err
}

func bounded(n int64) Count {
	if n >= MaxLooked {
		return Count{n, AtLeast}
	}
	return Count{n, Exact}
}

// estimateSQL is the planner's estimate of a table: rows to a page, as of the last ANALYZE, and its
// size now.
const estimateSQL = `
select case when c.reltuples < 0::float4 or c.relpages = 0 then -1
    else (c.reltuples::float8 / c.relpages::float8 * pg_catalog.pg_relation_size(c.oid)::float8 / pg_catalog.current_setting('block_size')::float8)::bigint end,
    pg_catalog.pg_relation_size(c.oid)
from pg_catalog.pg_class c where c.oid = $1::text::pg_catalog.regclass::oid`

// smallTable is a table's size in bytes up to which its rows are counted.
const smallTable = 1 << 20

// rows is how many rows a table has.
func (r *Reader) rows(ctx context.Context, table string) (Count, error) {
	var estimate, size int64
	if err := r.row(ctx, estimateSQL, r.schema.SQL("metered."+table)).Scan(&estimate, &size); err != nil {
		return Count{}, failed("estimate", err)
	}
	switch {
	case size <= smallTable:
		readable := map[string]string{"operations": "operations_words"}
		if view, ok := readable[table]; ok {
			table = view
		}
		var n int64
		err := r.row(ctx, "select count(*) from metered."+table).Scan(&n)
		return Count{n, Exact}, failed("count", err)
	case estimate < 0:
		return Count{0, Unknown}, nil
	}
	return Count{estimate, Estimated}, nil
}

// countScopesSQL counts up to $1 scopes, by skipping from one to the next.
const countScopesSQL = `
with recursive s as (
    (select l.scope from metered.ledger l order by l.scope limit 1)
    union all
    select (select l.scope from metered.ledger l where l.scope > s.scope order by l.scope limit 1)
    from s where s.scope is not null
)
select count(*) from (select from s where s.scope is not null limit $1) x`

// distinctSQL is the planner's number of scopes, for a role that may read the column.
const distinctSQL = `
select s.n_distinct from pg_catalog.pg_stats s where s.schemaname = $1 and s.tablename = 'ledger' and s.attname = 'scope'`

// fewScopes is how many scopes are counted one by one.
const fewScopes = 1000

func (r *Reader) scopes(ctx context.Context, entries Count) (Count, error) {
	var n int64
	if err := r.row(ctx, countScopesSQL, fewScopes).Scan(&n); err != nil {
		return Count{}, failed("count scopes", err)
	}
	if n < fewScopes {
		return Count{n, Exact}, nil
	}
	distinct, err := collect(ctx, r, distinctSQL, pgx.RowTo[float64], r.schema.String())
	switch {
	case err != nil:
		return Count{}, failed("estimate scopes", err)
	case len(distinct) == 0 || distinct[0] == 0:
		return Count{n, AtLeast}, nil
	case distinct[0] < 0: // a part of the entries
		return Count{max(n, int64(-distinct[0]*float64(entries.N))), Estimated}, nil
	}
	return Count{max(n, int64(distinct[0])), Estimated}, nil
}

// newestAheadSQL looks at the newest record, and the last pages of the ledger.
const newestAheadSQL = `
select (extract(epoch from greatest(
    (select pg_catalog.max(o.at) from metered.operations_words o),
    (select pg_catalog.max(l.at) from metered.ledger l where l.ctid >= $1::text::tid)) - metered.clock()) * 1e6)::bigint`

func (r *Reader) newestAhead(ctx context.Context) (time.Duration, error) {
	tail, err := r.tail(ctx)
	if err != nil {
		return 0, err
	}
	var us *int64
	if err := r.row(ctx, newestAheadSQL, tail).Scan(&us); err != nil || us == nil {
		return 0, failed("overview", err)
	}
	return max(0, time.Duration(*us)*time.Microsecond), nil
}

// tailPages are the last pages of the ledger that are looked at: some ten thousand entries.
const tailPages = 128

const tailSQL = `
select pg_catalog.concat('(', greatest(0, pg_catalog.pg_relation_size('metered.ledger'::pg_catalog.regclass)
	/ pg_catalog.current_setting('block_size')::int - $1::int), ',0)')`

// tail is where the last pages of the ledger begin. A scan of the pages after it reads no others.
func (r *Reader) tail(ctx context.Context) (tid string, err error) {
	err = r.row(ctx, tailSQL, tailPages).Scan(&tid)
	return tid, failed("size", err)
}

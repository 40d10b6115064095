package cells

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/schema"
)

// moved is a table whose rows move.
type moved struct {
	name  string
	where string // in terms of $1, the tenant, and $2, $3 and $4: the scopes of its claims, and the numbers of its holds and leases
	own   string // the name of a column that is derived from the schema's name, and its value for a row r, or ""
	value string
}

// named is the condition that a column has the tenant's name, or that and a part after a slash.
func named(column string) string {
	return strings.ReplaceAll(`(x.? = $1 or x.? >= $1::text || '/' and x.? < $1::text || '0')`, "?", column)
}

// scoped is named for a scope, which may be that of a claim.
func scoped(column string) string {
	return fmt.Sprintf(`(%s or x.%s = any ($2::text[]))`, named(column), column)
}

// The library's tables, in the order in which rows are packed. Whoever writes rows of a scope locks
// its last entry, or is the first to, and holds the tenant's lock: so once the entries are gone,
// nobody else writes the other rows of the tenant's scopes.
var tables = []moved{
	{name: "ledger", where: scoped("scope")},
	{name: "tallies", where: scoped("scope")},
	{name: "refund_sum", where: scoped("scope")},
	{name: "resources", where: scoped("scope")},
	{name: "hold_lines", where: `x.hold = any ($3::bigint[])`, own: "key", value: "metered._scope_key((s.r).scope)"},
	{name: "hold_events", where: `x.hold = any ($3::bigint[])`},
	{name: "holds", where: `x.no = any ($3::bigint[])`, own: "keys",
		value: `array(select distinct l.key from metered.hold_lines l where l.hold = (s.r).no order by 1)`},
	{name: "lease_spends", where: `x.lease = any ($4::bigint[])`},
	{name: "leases", where: `x.no = any ($4::bigint[])`, own: "fence", value: "metered._lease_key((s.r).no)"},
	{name: "lease_sum", where: scoped("scope")},
	{name: "lot_rows", where: scoped("scope")},
	{name: "lot_moves", where: scoped("scope")},
	{name: "lot_holds", where: scoped("scope")},
	{name: "lot_debts", where: scoped("scope")},
	{name: "plan_changes", where: scoped("scope")},
	{name: "feed_scopes", where: scoped("scope")},
	{name: "tokens", where: named("subject")},
	{name: "operations", where: named("tenant")},
	{name: "newest", where: named("tenant")},
	{name: "job_keys", where: named("tenant")},
}

// horizons are tables with one row, a time that the new cell takes over if it is later.
var horizons = []string{"operations_horizon", "holds_horizon"}

const (
	lockTenantSQL = `select pg_catalog.pg_advisory_xact_lock(metered._tenant_key($1)) from metered.operations_horizon h where h.one`

	// A spend of a transaction that did not enter the tenant holds its lease's lock.
	lockLeasesSQL = `select metered._lock_keys(array(
    select x.fence from metered.leases x where x.settled_at is null and x.mode = 's' and %s order by 1), $2)`

	// A transaction that did not enter the tenant may write a tally, and sees the deleted entry until the end.
	lockTalliesSQL = `select metered._lock_keys(array(
    select distinct metered._tally_key((x.body::metered.ledger).scope) from metered.packed_rows x
    where x.tenant = $1 and x.of_table = 'ledger' and (x.body::metered.ledger).tallied order by 1), $2)`

	// Nobody gives numbers until the move is committed or taken back: what has none gets one in the new cell.
	lockFeedSQL = `select s.last from metered.feed_state s where s.one for update`

	// Their numbers stay behind, and the feed goes on behind the last of them.
	leaveFeedSQL = `
with gone as (delete from metered.feed x where %s returning x.no)
insert into metered.feed_purged (no)
select g.no from (select pg_catalog.max(y.no) as no from gone y) g
where g.no > coalesce((select pg_catalog.max(p.no) from metered.feed_purged p), 0) on conflict do nothing`

	holdsSQL = `
select x.no, coalesce(x.claim, '') from metered.holds x
where %s or x.tenant = '' and x.no in (select l.hold from metered.hold_lines l where %s) for update`

	leasesSQL = `select x.no from metered.leases x where %s for update`

	departSQL = `
insert into metered.tenants as t (tenant, cell, moves, packed) values ($1, $2, $3, true)
on conflict (tenant) do update set cell = excluded.cell, moves = excluded.moves, packed = true`
)

// openSQL has all that cannot move: jobs that wait for units or run on some, holds across tenants,
// and carved units of which others have a part.
var openSQL = `
select 'job ' || x.job_id || ' waits for ' || coalesce(nullif(x.scope, ''), 'its next attempt') from metered.parked_jobs x
where ` + named("tenant") + ` or exists (select from pg_catalog.unnest(x.charges::metered.new_charge[]) c where ` + strings.ReplaceAll(named("scope"), "x.", "c.") + `)
union all
select 'hold ' || x.id || ' is that of a job' from metered.holds x where x.no = any ($3::bigint[]) and x.pending and x.id like 'job/%'
union all
select 'hold ' || h.id || ' of tenant "' || h.tenant || '" has units of ' || x.scope from metered.hold_lines x join metered.holds h on h.no = x.hold
where x.open > 0 and (x.hold = any ($3::bigint[])) <> ` + scoped("scope") + `
union all
select 'lease ' || x.no || ' of ' || x.scope || ' was carved for ' || x.child from metered.leases x
where x.mode = 'c' and x.settled_at is null and ` + named("scope") + ` <> ` + named("child") + `
   or x.mode = 'r' and x.settled_at is null and ` + named("scope") + `
   or x.mode = 'g' and (x.home_at is null or x.ends_at > metered.clock()) and ` + named("scope") + `
union all
select distinct 'consumer ' || c.consumer || ' of the feed has not consumed entries of ' || x.scope
from metered.feed_consumers c join metered.feed x on x.no > c.no where ` + scoped("scope") + `
limit 10`

// pack takes the tenant out of a cell: its rows become those of packed_rows, and its own row says
// where it goes.
func (r *Router) pack(ctx context.Context, tx pgx.Tx, m Move, at int) (tenantRow, error) {
	c := r.cells[at]
	exec := func(sql string, args ...any) error {
		_, err := tx.Exec(ctx, c.schema.SQL(sql), args...)
		return err
	}
	wait := m.LockTimeout.Milliseconds()
	if err := exec(`select pg_catalog.set_config('lock_timeout', $1, true)`, fmt.Sprint(wait)); err != nil {
		return tenantRow{}, err
	}
	if err := exec(lockTenantSQL, m.Tenant); err != nil {
		return tenantRow{}, err
	}
	row, err := c.row(ctx, tx, m.Tenant)
	if err != nil {
		return row, err
	}
	if row.packed || row.found && row.cell != at || !row.found && at != r.first(m.Tenant) {
		return row, errDecided
	}
	row = tenantRow{found: true, place: place{m.To, row.moves + 1}, packed: true}
	if err := exec(departSQL, m.Tenant, row.cell, row.moves); err != nil {
		return row, err
	}
	return row, (&packing{tx: tx, schema: c.schema, move: m}).run(ctx)
}

// packing is the packing of a tenant's rows.
type packing struct {
	tx            pgx.Tx
	schema        schema.Name
	move          Move
	claims        []string
	holds, leases []int64
}

func (p *packing) run(ctx context.Context) error {
	if _, err := p.tx.Exec(ctx, p.schema.SQL(lockFeedSQL)); err != nil {
		return err
	}
	if _, err := p.tx.Exec(ctx, p.schema.SQL(fmt.Sprintf(lockLeasesSQL, named("scope"))), p.move.Tenant, p.move.LockTimeout.Milliseconds()); err != nil {
		return err
	}
	if err := p.find(ctx); err != nil {
		return err
	}
	for i, t := range tables {
		for { // a transaction that did not enter the tenant may have written an entry while its last one was waited for
			n, err := p.take(ctx, i, "metered."+t.name, t.name, t.where)
			if err != nil {
				return err
			}
			if n == 0 || t.name != "ledger" {
				break
			}
		}
		if t.name == "ledger" { // the holds, leases and tallies of the scopes stay as they are from here on
			if _, err := p.tx.Exec(ctx, p.schema.SQL(lockTalliesSQL), p.move.Tenant, p.move.LockTimeout.Milliseconds()); err != nil {
				return err
			}
			if err := p.find(ctx); err != nil {
				return err
			}
		}
	}
	if _, err := p.tx.Exec(ctx, p.schema.SQL(fmt.Sprintf(leaveFeedSQL, scoped("scope"))), p.move.Tenant, p.claims); err != nil {
		return err
	}
	for i, name := range horizons {
		if _, err := p.tx.Exec(ctx, p.schema.SQL(`insert into metered.packed_rows select $1::text, $2::int, 1, $3::text, row(x.*)::text from metered.`+name+` x where pg_catalog.random() >= 0`),
			p.move.Tenant, len(tables)+i, name); err != nil {
			return err
		}
	}
	_, err := p.tx.Exec(ctx, `select pg_catalog.set_config('search_path', $1, true)`, p.schema.String())
	for i := len(p.move.Tables) - 1; i >= 0 && err == nil; i-- { // rows that refer to others come later, and go first
		t := p.move.Tables[i]
		where := t.Where
		if where == "" {
			where = "tenant = $1"
		}
		_, err = p.take(ctx, len(tables)+len(horizons)+i, qualified(p.schema, t.Name), t.Name, where)
	}
	return err
}

// find finds the tenant's holds with their claims, and its leases, and refuses a move while some
// things are open.
func (p *packing) find(ctx context.Context) error {
	lines := strings.ReplaceAll(named("scope"), "x.", "l.")
	rows, _ := p.tx.Query(ctx, p.schema.SQL(fmt.Sprintf(holdsSQL, named("tenant"), lines)), p.move.Tenant)
	var no int64
	var claim string
	p.claims, p.holds = []string{}, []int64{}
	_, err := pgx.ForEachRow(rows, []any{&no, &claim}, func() error {
		if p.holds = append(p.holds, no); claim != "" {
			p.claims = append(p.claims, claim)
		}
		return nil
	})
	if err != nil {
		return err
	}
	rows, _ = p.tx.Query(ctx, p.schema.SQL(fmt.Sprintf(leasesSQL, named("scope"))), p.move.Tenant)
	if p.leases, err = pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil {
		return err
	}
	rows, _ = p.tx.Query(ctx, p.schema.SQL(openSQL), p.move.Tenant, p.claims, p.holds)
	open, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil && len(open) > 0 {
		return fmt.Errorf("%w: %q: %s", errOpen, p.move.Tenant, strings.Join(open, "; "))
	}
	return err
}

// packSQL packs the rows that a condition has. They are built, since on Citus the row of a shard
// has another type than its table. Citus 13 gives an insert with a stable function, as the text of
// a row is, a condition without a column. A volatile function keeps it from that.
const packSQL = `
with args as (select $1::text, $2::text[], $3::bigint[], $4::bigint[]), gone as (delete from %s x where %s returning row(x.*) as r)
insert into metered.packed_rows (tenant, nth, row_no, of_table, body)
select $1, $5::int, coalesce((select pg_catalog.max(y.row_no) from metered.packed_rows y where y.tenant = $1 and y.nth = $5), 0) + pg_catalog.row_number() over (), $6::text, g.r::text
from gone g where pg_catalog.random() >= 0`

// take packs the rows of a table.
func (p *packing) take(ctx context.Context, nth int, table, name, where string) (int64, error) {
	tag, err := p.tx.Exec(ctx, p.schema.SQL(fmt.Sprintf(packSQL, table, where)), p.move.Tenant, p.claims, p.holds, p.leases, nth, name)
	return tag.RowsAffected(), err
}

func qualified(n schema.Name, table string) string {
	return pgx.Identifier{n.String(), table}.Sanitize()
}

// beginSQL makes statements and the text of rows the same in all sessions, and a step durable
// before the next one, on another server, relies on it.
const beginSQL = `
set local search_path = pg_catalog, pg_temp;
select pg_catalog.set_config('synchronous_commit', 'on', true) where pg_catalog.current_setting('synchronous_commit') = 'off';
set local datestyle = 'ISO, MDY';
set local intervalstyle = 'postgres';
set local timezone = 'UTC';
set local bytea_output = 'hex';
set local extra_float_digits = 1`

const batchSQL = `select body, row_no from metered.packed_rows where tenant = $1 and nth = $2 and row_no > $3 order by row_no limit 250`

// A row is read once, and not for each of its columns.
const insertSQL = `
insert into %s (%s) overriding system value
select %s from (select b.body::%[1]s as r from pg_catalog.unnest($1::text[]) b(body) offset 0) s where pg_catalog.random() >= 0`

type reader interface {
	querier
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// unpack makes the rows that are packed in one cell those of another, after so many moves, or of
// the same one again.
func (r *Router) unpack(ctx context.Context, packed reader, tx pgx.Tx, tenant string, at, to int, moves int64) error {
	from, c := r.cells[at], r.cells[to]
	if to != at {
		if told, err := c.tell(ctx, tx, tenant, place{to, moves}); err != nil || !told {
			return cmp.Or(err, errDecided)
		}
	}
	rows, _ := packed.Query(ctx, from.schema.SQL(`select distinct nth, of_table from metered.packed_rows where tenant = $1 order by nth`), tenant)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
		Nth  int
		Name string
	}])
	var names []string
	for _, t := range all {
		names = append(names, t.Name)
	}
	var columns map[string][]column
	if err == nil {
		columns, err = c.columns(ctx, tx, names)
	}
	for _, t := range all {
		sql := c.insert(t.Nth, t.Name, columns[t.Name])
		for last := int64(0); err == nil; {
			var bodies []string
			var body string
			rows, _ := packed.Query(ctx, from.schema.SQL(batchSQL), tenant, t.Nth, last)
			if _, err = pgx.ForEachRow(rows, []any{&body, &last}, func() error { bodies = append(bodies, body); return nil }); err != nil || len(bodies) == 0 {
				break
			}
			if slices.Contains(horizons, t.Name) && t.Nth >= len(tables) && t.Nth < len(tables)+len(horizons) {
				err = c.raise(ctx, tx, t.Name, bodies[0])
			} else {
				_, err = tx.Exec(ctx, sql, bodies)
			}
		}
	}
	if err == nil && to == at {
		var told bool
		if told, err = c.tell(ctx, tx, tenant, place{to, moves}); err == nil && !told {
			err = errDecided
		}
	}
	return err
}

// raise has a cell take over a horizon, given as its row's text, if that is later. Citus refuses to
// read the row in the UPDATE.
func (c cell) raise(ctx context.Context, tx pgx.Tx, name, body string) error {
	var at string
	err := tx.QueryRow(ctx, c.schema.SQL(`select (($1::text::metered.`+name+`).at)::text`), body).Scan(&at)
	if err == nil {
		_, err = tx.Exec(ctx, c.schema.SQL(`update metered.`+name+` h set at = $1::text::timestamptz where h.one and h.at < $1::text::timestamptz`), at)
	}
	return err
}

// insert is the statement that inserts rows of a table of a cell, given as texts.
func (c cell) insert(nth int, name string, columns []column) string {
	var names, values []string
	for _, of := range columns {
		if of.generated {
			continue
		}
		value := "(s.r)." + of.name
		if nth < len(tables) && "\""+tables[nth].own+"\"" == of.name {
			value = c.schema.SQL(tables[nth].value)
		}
		names, values = append(names, of.name), append(values, value)
	}
	return fmt.Sprintf(insertSQL, qualified(c.schema, name), strings.Join(names, ", "), strings.Join(values, ", "))
}

// column is a column of a table, its name quoted.
type column struct {
	name      string
	generated bool
}

const columnsSQL = `
select t.name, a.attname, a.attgenerated <> '' from pg_catalog.unnest($2::text[]) t(name), pg_catalog.pg_attribute a
where a.attrelid = pg_catalog.format('%I.%I', $1::text, t.name)::regclass::pg_catalog.oid and a.attnum > 0 and not a.attisdropped order by a.attnum`

// columns are those of tables of a cell, in their order.
func (c cell) columns(ctx context.Context, db reader, names []string) (map[string][]column, error) {
	rows, _ := db.Query(ctx, columnsSQL, c.schema.String(), names)
	var table string
	var of column
	all := map[string][]column{}
	_, err := pgx.ForEachRow(rows, []any{&table, &of.name, &of.generated}, func() error {
		all[table] = append(all[table], column{pgx.Identifier{of.name}.Sanitize(), of.generated})
		return nil
	})
	return all, err
}

// sameColumns refuses tables whose rows, as texts, would be others in the new cell.
func (r *Router) sameColumns(ctx context.Context, own []Table, from, to cell) error {
	names := []string{}
	for _, t := range tables {
		names = append(names, t.name)
	}
	for _, t := range own {
		names = append(names, t.Name)
	}
	a, err := from.columns(ctx, from.pool, names)
	if err != nil {
		return err
	}
	b, err := to.columns(ctx, to.pool, names)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !slices.Equal(a[name], b[name]) {
			return fmt.Errorf("%w: the columns differ: %s of %s and %s", errConflict, name, from.schema, to.schema)
		}
	}
	return nil
}

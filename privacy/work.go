package privacy

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// beginSQL makes the statements mean pg_catalog's operators, and bounds waits for rows. It returns the
// settings as they were.
const beginSQL = `
with before as materialized (
    select pg_catalog.array_agg(pg_catalog.current_setting(s.name) order by s.nth) as values
    from pg_catalog.unnest(array['search_path', 'jit', 'lock_timeout']) with ordinality s(name, nth)
)
select b.values, pg_catalog.current_setting('transaction_isolation'), metered._bound_lock_wait($1::int),
    pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true), pg_catalog.set_config('jit', 'off', true)
from before b`

const endSQL = `
select pg_catalog.set_config(s.name, s.value, true)
from unnest(array['search_path', 'jit', 'lock_timeout'], $1::text[]) s(name, value)`

// work is one call of Pseudonymize.
type work struct {
	*Register
	person
	tx     pgx.Tx
	left   int64 // rows that the call may still rewrite
	report Report
}

func (w *work) run(ctx context.Context) error {
	further, err := w.further(ctx, w.tx)
	if err != nil {
		return err
	}
	var before []string
	var level string
	var ignored *string
	err = answer.QueryRow(ctx, w.tx, w.name.SQL(beginSQL), w.lockTimeout.Milliseconds()).
		Scan(&before, &level, &ignored, &ignored, &ignored)
	if err == nil && level != "read committed" {
		err = misuse("tx", "is %s: an old snapshot does not see all rows, so it must be read committed", level)
	}
	if err != nil {
		return err
	}
	all := append(slices.Clone(tables), further...)
	counts := make([]int64, len(all))
	scopes, err := w.scopes(ctx)
	for i, t := range all {
		if err == nil {
			counts[i], err = w.look(ctx, t)
		}
	}
	w.report.Done = true
	err = w.rewriteEach(ctx, all, counts, true, err)
	var aliases []string
	if err == nil {
		aliases, err = w.renameScopes(ctx, scopes)
	}
	err = w.rewriteEach(ctx, all, counts, false, err)
	if err == nil && len(aliases) > 0 { // entries that were written between the look and the locks
		err = w.exec(ctx, rewriteSQL(tables[0], " and x.scope = any ($5::text[])"), append(w.args(), aliases)...)
	}
	if err == nil {
		_, err = w.tx.Exec(ctx, endSQL, before)
	}
	return err
}

// rewriteEach rewrites the tables whose rows never change, before the locks of scopes are taken, so
// that these are kept for less time. Rows of the others are locked by those who have a scope's lock,
// and so come after it.
func (w *work) rewriteEach(ctx context.Context, all []table, counts []int64, appended bool, err error) error {
	for i, t := range all {
		if err == nil && counts[i] > 0 && t.appended == appended {
			err = w.rewrite(ctx, t, counts[i])
		}
	}
	return err
}

// exec runs a statement, whose first arguments are the person's, and counts its rows.
func (w *work) exec(ctx context.Context, sql string, args ...any) error {
	tag, err := w.tx.Exec(ctx, w.name.SQL(sql), args...)
	w.report.Rows += tag.RowsAffected()
	w.left -= tag.RowsAffected()
	return err
}

// namedSQL finds the scopes of a person, their new names, and how many entries they have.
var namedSQL = func() string {
	var each []string
	for _, t := range tables {
		for _, name := range t.scopes {
			c := column{name, text, ""}
			each = append(each, fmt.Sprintf("select x.%s as scope from %s x where %s", name, t.name, c.has()))
		}
	}
	return `
select s.scope, pg_catalog.regexp_replace(s.scope collate "C", $2, $4, 'g'), (select count(*) from metered.ledger l where l.scope = s.scope)
from (` + strings.Join(each, "\nunion\n") + `) s
where $3::text is not null
order by s.scope`
}()

// openSQL is what is open in scopes. A lease is spent from by its number, and a job waits in a line, in the memory of programs
// that know the scope's old name.
const openSQL = `
select x.scope, 'lease ' || x.no || ' of ' || x.scope || ' is open' from metered.leases x
where x.settled_at is null and (x.scope = any ($1::text[]) or x.child = any ($1::text[]))
union all
select x.child, 'lease ' || x.no || ' of ' || x.scope || ' is open' from metered.leases x
where x.settled_at is null and x.child = any ($1::text[])
union all
select s.scope, 'job ' || x.job_id || ' waits for units' from metered.parked_jobs x, unnest($1::text[]) s(scope)
where x.scope = s.scope or x.passed = s.scope or pg_catalog.strpos(x.charges, s.scope) > 0
union all
select l.scope, 'hold ' || h.id || ' is that of a job' from metered.hold_lines l join metered.holds h on h.no = l.hold
where l.scope = any ($1::text[]) and h.pending and h.id like 'job/%'`

const (
	lockSQL = `
select metered._lock_keys(array(select metered._scope_key(s) from unnest($1::text[]) s group by 1 order by 1), $2),
    metered._lock_keys(array(select metered._tally_key(s) from unnest($1::text[]) s group by 1 order by 1), $2)`

	// The feed gets no number meanwhile, and its round, which goes by the order of names, begins anew.
	holdFeedSQL = `select s.last from metered.feed_state s where s.one for update`
	endRoundSQL = `delete from metered.feed_round`

	// Nor does a log take entries down, which goes by names, too.
	holdLogSQL = `lock table metered.notary_heads in share row exclusive mode`

	takenSQL = `
select exists (select from metered.ledger x where x.scope = any ($1::text[]))
    or exists (select from metered.tallies x where x.scope = any ($1::text[]))
    or exists (select from metered.resources x where x.scope = any ($1::text[]))
    or exists (select from metered.leases x where x.scope = any ($1::text[]) or x.child = any ($1::text[]))
    or exists (select from metered.hold_lines x where x.scope = any ($1::text[]))
    or exists (select from metered.lot_rows x where x.scope = any ($1::text[]))`

	// The keys of the locks of holds and lines are those of the scopes' names.
	holdKeysSQL = `
update metered.holds x set keys = array(select distinct l.key from metered.hold_lines l where l.hold = x.no order by 1)
where x.no in (select l.hold from metered.hold_lines l where l.scope = any ($1::text[]))`
)

// named is a scope that has the name.
type named struct {
	scope, alias string
	entries      int64
}

func (w *work) scopes(ctx context.Context) ([]named, error) {
	rows, _ := answer.Query(ctx, w.tx, w.name.SQL(namedSQL), w.args()...)
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (n named, err error) {
		if err = row.Scan(&n.scope, &n.alias, &n.entries); err == nil && len(n.alias) > maxName {
			err = invalid("alias", "makes a scope's name of %d bytes, and %d are the most",
				len(n.alias), maxName)
		}
		return n, err
	})
}

// renameScopes renames as many scopes as the call may, and one at least if anything is left of its rows. It
// returns their new names.
func (w *work) renameScopes(ctx context.Context, all []named) (aliases []string, err error) {
	var scopes []string
	for _, n := range all {
		scopes = append(scopes, n.scope)
	}
	open, err := w.open(ctx, scopes)
	if err != nil {
		return nil, err
	}
	scopes = nil
	sum := int64(0)
	for _, n := range all {
		if sum += n.entries; open[n.scope] || w.left <= 0 || len(scopes) > 0 && sum > w.left {
			w.report.Done = false
			continue
		}
		scopes, aliases = append(scopes, n.scope), append(aliases, n.alias)
	}
	if len(scopes) == 0 {
		return nil, nil
	}
	if _, err := w.tx.Exec(ctx, w.name.SQL(lockSQL), append(slices.Clone(aliases), scopes...),
		w.lockTimeout.Milliseconds()); err != nil {
		return nil, err
	}
	for _, sql := range []string{holdFeedSQL, endRoundSQL, holdLogSQL} {
		if _, err := w.tx.Exec(ctx, w.name.SQL(sql)); err != nil {
			return nil, err
		}
	}
	open, err = w.open(ctx, scopes) // what was opened before the locks
	if err == nil && len(open) > 0 {
		err = fault.ErrSerialization
	}
	var taken bool
	if err == nil {
		err = answer.QueryRow(ctx, w.tx, w.name.SQL(takenSQL), aliases).Scan(&taken)
	}
	if err == nil && taken {
		err = ErrAliasTaken
	}
	for _, t := range tables {
		for _, name := range t.scopes {
			if err == nil {
				err = w.exec(ctx, renameSQL(t, name), scopes, aliases)
			}
		}
	}
	if err == nil {
		_, err = w.tx.Exec(ctx, w.name.SQL(holdKeysSQL), aliases)
	}
	w.report.Scopes = len(scopes)
	return aliases, err
}

func renameSQL(t table, column string) string {
	key := ""
	if t.name == "metered.hold_lines" || t.name == "metered.parked_scopes" {
		key = ", key = n.key"
	}
	if t.name == "metered.notary_scopes" { // without the salt, nobody can guess the name behind the commitment
		key = ", salt = null"
	}
	return fmt.Sprintf(`
with n as materialized (
    select s.scope, s.alias, metered._scope_key(s.alias) as key from unnest($1::text[], $2::text[]) s(scope, alias))
update %s x set %s = n.alias%s from n where x.%[2]s = n.scope`, t.name, column, key)
}

// open are the scopes in which something is open.
func (w *work) open(ctx context.Context, scopes []string) (map[string]bool, error) {
	open := map[string]bool{}
	var scope, what string
	rows, _ := answer.Query(ctx, w.tx, w.name.SQL(openSQL), scopes)
	_, err := pgx.ForEachRow(rows, []any{&scope, &what}, func() error {
		open[scope] = true
		w.stays(what)
		return nil
	})
	return open, err
}

const maxOpen = 20

func (w *work) stays(what string) {
	if len(w.report.Open) < maxOpen && !slices.Contains(w.report.Open, what) {
		w.report.Open = append(w.report.Open, what)
	}
}

// rewrite rewrites rows of a table, but for names of scopes: all of them, or as many as the call may.
func (w *work) rewrite(ctx context.Context, t table, rows int64) error {
	if t.open != "" || w.left <= 0 {
		w.report.Done = false
		return nil
	}
	of, args := "", w.args()
	if rows > w.left {
		w.report.Done = false
		of = fmt.Sprintf(`
    and x.ctid = any (array(select x.ctid from %s x where %s limit $5))`, t.name, anyOf(t.columns, column.has))
		args = append(args, w.left)
	}
	if slices.ContainsFunc(t.columns, column.isStable) { // the rows are found before they are rewritten
		if _, err := w.tx.Exec(ctx, w.name.SQL(fmt.Sprintf("select count(*) from (select from %s x where %s for update) y",
			t.name, having(t, of))), args...); err != nil {
			return err
		}
	}
	return w.exec(ctx, rewriteSQL(t, of), args...)
}

// having is the condition that a column of a row x has the name, and that the row is one of some.
func having(t table, of string) string {
	return fmt.Sprintf("$2::text is not null and $3::text is not null and $4::text is not null and (%s)%s",
		anyOf(t.columns, column.has), of)
}

// rewriteSQL rewrites the rows of a table that have the name, or some of them.
func rewriteSQL(t table, of string) string {
	found, sets := []string{"x.ctid"}, make([]string, len(t.columns))
	for i, c := range t.columns {
		found, sets[i] = append(found, c.value()+" as "+c.name), c.name+" = "+c.value()
	}
	if !slices.ContainsFunc(t.columns, column.isStable) {
		return fmt.Sprintf("update %s x set %s\nwhere %s", t.name, strings.Join(sets, ",\n    "), having(t, of))
	}
	for i, c := range t.columns {
		sets[i] = c.name + " = x." + c.name
	}
	return fmt.Sprintf("with x as materialized (\nselect %s\nfrom %s x\nwhere %s)\nupdate %[2]s o set %[4]s from x where o.ctid = x.ctid",
		strings.Join(found, ",\n    "), t.name, having(t, of), strings.Join(sets, ", "))
}

// look counts the rows of a table whose columns have the name, but for names of scopes.
func (w *work) look(ctx context.Context, t table) (rows int64, err error) {
	what, has := cmp.Or(t.open, "null::text"), "false"
	if len(t.columns) > 0 {
		has = anyOf(t.columns, column.has)
	}
	var near int64
	var open []string
	err = answer.QueryRow(ctx, w.tx, w.name.SQL(fmt.Sprintf(`
select count(*) filter (where s.has), count(*) filter (where s.near), (array_agg(distinct s.what) filter (where s.has and s.what is not null))[1:%d]
from (select coalesce(%s, false) as has, coalesce(%s, false) and (%s) is not true as near, %s as what from %s x
    where $1::text is not null and $2::text is not null and $3::text is not null and (%s or %s)) s`,
		maxOpen, has, anyOf(t.all(), column.near), anyOf(t.all(), column.has), what, t.name, has,
		anyOf(t.all(), column.near))),
		w.subject, w.plain, w.escaped).Scan(&rows, &near, &open)
	for _, what := range open {
		w.stays(what)
	}
	w.report.Near += near
	return rows, err
}

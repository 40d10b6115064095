package privacy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/privacy"
)

// columnsSQL has all columns of all tables of the schema that can have text, by the catalog.
const columnsSQL = `
select c.relname::text, a.attname::text, pg_catalog.format_type(a.atttypid, null), a.attnotnull
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attidentity = ''
where c.relnamespace = 'metered'::regnamespace and c.relkind in ('r', 'p')
order by 1, a.attnum`

type columnOf struct {
	Table, Name, Type string
	NotNull           bool
}

// noNames are columns of text, or of bytes, that have no name of a caller's in them, and why.
var noNames = map[string]string{
	"holds fingerprint": "a hash", "operations fingerprint": "a hash", "lot_rows fingerprint": "a hash", "plan_changes fingerprint": "a hash",
	"tokens digest": "a hash", "job_keys digest": "a hash", "plan_changes kind": "one of three words",
	"notary_scopes commitment": "a hash", "notary_scopes salt": "random", "notary_hashes hashes": "hashes", "notary_heads head": "sizes and hashes",
}

// planted is a row of each table with the name in each column that can have it. nth makes rows differ.
func planted(t *testing.T, pool *pgxpool.Pool, name string, nth int) (where []string) {
	t.Helper()
	rows, err := pool.Query(t.Context(), columnsSQL)
	require.NoError(t, err)
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[columnOf])
	require.NoError(t, err)
	values := map[string][][2]string{}
	var tables []string
	for _, c := range columns {
		if slices.Contains([]string{"cell", "schema_version", "operations_horizon", "holds_horizon", "feed_state"}, c.Table) {
			continue // one row, without text
		}
		if len(values[c.Table]) == 0 {
			tables = append(tables, c.Table)
		}
		value, has := "null", true
		word := fmt.Sprintf("%s/%s/%d", name, c.Name, nth)
		quoted := strings.ReplaceAll(word, "'", "''")
		doc := fmt.Sprintf(`{"actor": "for %s.", "%s": [1, "\n%s"]}`, word, name, strings.ReplaceAll(name, "/", `\/`))
		doc = strings.ReplaceAll(doc, "'", "''")
		switch {
		case c.Table == "notary_heads" && c.Name == "head":
			value, has = "'a head'", false
		case noNames[c.Table+" "+c.Name] == "one of three words":
			value, has = "'changed'", false
		case c.Type == "text":
			value = "'" + quoted + "'"
		case c.Type == "json" || c.Type == "jsonb":
			value = "'" + doc + "'"
		case c.Table == "operations" && c.Name == "holds":
			value = "array['" + doc + "', null, '{}']"
		case c.Type == "text[]":
			value = "array['other', null, '" + quoted + "']"
		case c.Table == "operations" && c.Name == "result":
			value = "convert_to('" + doc + "', 'UTF8')"
		case c.Type == "metered.lot_plan":
			value = fmt.Sprintf("row(null, 5, '%s', null, null, null, null, '%[1]s', array['%[1]s', 'api'])::metered.lot_plan", quoted)
		case c.Type == "bytea":
			value, has = fmt.Sprintf("sha256('%d')", nth), false
		case c.Name == "state":
			value, has = "'r'", false
		case c.Name == "settled_at" || c.Name == "ended_at":
			value, has = "now()", false
		case c.NotNull:
			value, has = map[string]string{"bigint": fmt.Sprint(nth), "integer": "1", "smallint": "1", "metered.units": "1", `"char"`: "'c'", "boolean": "false",
				"timestamp with time zone": "now()", "interval": "'1 day'", "bigint[]": "'{1}'"}[c.Type], false
			require.NotEmpty(t, value, "%s.%s: a type without a value", c.Table, c.Name)
		default:
			has = false
		}
		values[c.Table] = append(values[c.Table], [2]string{c.Name, value})
		if has {
			where = append(where, c.Table+" "+c.Name)
		}
	}
	for _, table := range tables {
		var names, set []string
		for _, v := range values[table] {
			names, set = append(names, v[0]), append(set, v[1])
		}
		_, err := pool.Exec(t.Context(), fmt.Sprintf("insert into metered.%s (%s) values (%s)", table, strings.Join(names, ", "), strings.Join(set, ", ")))
		require.NoError(t, err, table)
	}
	return where
}

// found are the columns that have a name: of all tables of the schema, as text, and what is escaped or hexadecimal, too.
func found(t *testing.T, pool *pgxpool.Pool, name string) (where []string) {
	t.Helper()
	rows, err := pool.Query(t.Context(), columnsSQL)
	require.NoError(t, err)
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[columnOf])
	require.NoError(t, err)
	for _, c := range columns {
		if pgtest.Value[bool](t, pool, fmt.Sprintf(`select exists (select from metered.%[1]s x where strpos(x.%[2]s::text, $1) > 0
			or strpos(replace(x.%[2]s::text, '\', ''), $1) > 0 or strpos(x.%[2]s::text, encode(convert_to($1, 'UTF8'), 'hex')) > 0)`, c.Table, c.Name), name) {
			where = append(where, c.Table+" "+c.Name)
		}
	}
	return where
}

// files are the relations of the schema, indexes and toasts too, whose files have a name.
func files(t *testing.T, pool *pgxpool.Pool, name string) []string {
	t.Helper()
	_, err := pool.Exec(t.Context(), "checkpoint")
	require.NoError(t, err)
	return pgtest.Value[[]string](t, pool, `
select coalesce(array_agg(distinct c.oid::regclass::text), '{}')
from pg_class c left join pg_index i on i.indexrelid = c.oid left join pg_class o on o.reltoastrelid in (c.oid, i.indrelid)
where coalesce(o.relnamespace, c.relnamespace) = 'metered'::regnamespace and pg_relation_filepath(c.oid) is not null
    and position(convert_to($1, 'UTF8') in coalesce(pg_read_binary_file(pg_relation_filepath(c.oid), 0, 268435456, true), '')) > 0`, name)
}

const subject = "user/ann"

func TestPseudonymize_LeavesTheNameInNoColumnOfAnyTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	planted(t, pool, "user/anna", 1)
	others := found(t, pool, "user/anna/")
	where := planted(t, pool, subject, 2)
	require.Equal(t, where, found(t, pool, subject+"/"), "the search finds it in each column")
	exempt := 0
	rows, err := pool.Query(t.Context(), columnsSQL)
	require.NoError(t, err)
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[columnOf])
	require.NoError(t, err)
	for _, c := range columns {
		if noNames[c.Table+" "+c.Name] != "" {
			exempt++
		} else if c.Type == "text" || c.Type == "text[]" || c.Type == "json" || c.Type == "jsonb" || c.Type == "bytea" {
			require.Contains(t, where, c.Table+" "+c.Name, "a column that has no name in this test")
		}
	}
	require.Equal(t, len(noNames), exempt)
	require.Contains(t, files(t, pool, subject+"/"), "metered.ledger_pkey")
	_, err = pool.Exec(t.Context(), "analyze")
	require.NoError(t, err)
	const statisticsSQL = `select count(*) from pg_stats s
	where s.schemaname = 'metered' and strpos(s::text, $1) > 0 and s.tablename not in ('parked_jobs', 'packed_rows', 'feed_round')` // analyze leaves those of an empty table
	require.Positive(t, pgtest.Value[int](t, pool, statisticsSQL, subject+"/"))

	register, err := privacy.New(privacy.Config{})
	require.NoError(t, err)
	pseudonymize := func(name, alias string) (report privacy.Report) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
			report, err = register.Pseudonymize(t.Context(), tx, name, alias)
			return err
		}))
		return report
	}
	report := pseudonymize(subject, "gone/7f3a")
	require.False(t, report.Done)
	require.Len(t, report.Open, 2, "%v", report.Open)
	_, err = pool.Exec(t.Context(), "delete from metered.parked_jobs; delete from metered.packed_rows")
	require.NoError(t, err)
	report = pseudonymize(subject, "gone/7f3a")
	require.True(t, report.Done, "%+v", report)
	require.Empty(t, found(t, pool, subject+"/"))
	require.NotContains(t, strings.Join(found(t, pool, "gone/7f3a/"), ","), "parked_jobs")
	for _, c := range where {
		if !strings.HasPrefix(c, "parked_jobs ") && !strings.HasPrefix(c, "packed_rows ") && c != "feed_round scope" { // which ends
			require.Contains(t, found(t, pool, "gone/7f3a"), c)
		}
	}
	for _, c := range others {
		if !strings.HasPrefix(c, "parked_jobs ") && !strings.HasPrefix(c, "packed_rows ") && c != "feed_round scope" { // which ends
			require.Contains(t, found(t, pool, "user/anna/"), c, "another person's")
		}
	}

	require.NotEmpty(t, files(t, pool, subject+"/"), "dead rows are there until the table is rewritten")
	_, err = pool.Exec(t.Context(), "vacuum full "+pgtest.Value[string](t, pool, `
select string_agg(c.oid::regclass::text, ', ') from pg_class c where c.relnamespace = 'metered'::regnamespace and c.relkind = 'r'`))
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), "analyze")
	require.NoError(t, err)
	require.Empty(t, files(t, pool, subject+"/"))
	require.Zero(t, pgtest.Value[int](t, pool, statisticsSQL, subject+"/"))
}

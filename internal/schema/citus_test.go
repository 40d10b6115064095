package schema_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// What a lock costs on Citus is not there elsewhere: the planner works _sharded out.
func TestTryLock_IsPostgresOwnOffCitus(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	rows, err := pool.Query(t.Context(), `explain (verbose, costs off)
		select metered._try_lock(c.key), metered._try_lock_shared(c.key) from (select (array[row(null, 1, 1, 0, null, null, null, null, null)::metered.new_charge])[1].key offset 0) c`)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Contains(t, lines[1], "Output: pg_try_advisory_xact_lock(", lines)
	require.NotContains(t, lines[1], "metered.", lines)
}

// Citus gives a row of a table the type of its shard, has no word for the assignment of an element that a query of a table gives, and sends a worker no
// value of a type of ours that the query does not name: PL/pgSQL counts the target of an assignment as a value of its query.
func TestFunctions_AreWordedForCitus(t *testing.T) {
	t.Parallel()
	sql, err := os.ReadFile("../../schema.sql")
	require.NoError(t, err)
	for wrong, pattern := range map[string]string{
		"a row as a value, and not row(y.*)::metered.t":     `select (\w+) from metered\.(\w+) (\w+)\b`,
		"a row as a column, and not row(y.*)::metered.t":    `, (\w+)(?: as \w+)?\s+from metered\.(\w+) (\w+)\b`,
		"a row as an argument, and not row(y.*)::metered.t": `metered\.\w+\((\w+), [^\n;]*\) from metered\.(\w+) (\w+)\b`,
	} {
		for _, m := range regexp.MustCompile(pattern).FindAllSubmatch(sql, -1) {
			require.False(t, string(m[1]) == string(m[3]) && string(m[2]) != "lots", "%s: %s", wrong, m[0]) // lots is a view
		}
	}
	require.NotRegexp(t, `\n +update metered\.[^;]*metered\.clock\(\)`, string(sql), "a volatile function in an UPDATE, and not a variable")
	for _, m := range regexp.MustCompile(`with recursive \w+ ?\([^)]*\) as \(\s*select .*`).FindAll(sql, -1) {
		require.Contains(t, string(m), `collate "C"`, "a variable at the head of a recursion has no collation on a worker")
	}
	for _, m := range regexp.MustCompile(`(?m)^ +\w+(?:\[[^\]\n]*\]|\.\w+)+ := [^;]*;`).FindAll(sql, -1) {
		require.NotRegexp(t, `from metered\.\w+`, string(m), "an element is assigned, and not selected into")
	}
	for _, function := range regexp.MustCompile(`(?s)create (?:or replace )?function .*?\n\$\$;`).FindAllString(string(sql), -1) {
		for _, of := range regexp.MustCompile(`\b(\w+) +metered\.\w+`).FindAllStringSubmatch(function, -1) {
			for _, m := range regexp.MustCompile(`(?m)^ +`+of[1]+` := ([^;]*);`).FindAllStringSubmatch(function, -1) {
				if regexp.MustCompile(`from metered\.\w+\s[^(]`).MatchString(m[1]) {
					require.Regexp(t, `\b`+of[1]+`\b`, m[1], "a value of a type of ours is assigned, and not selected into: %s", m[0])
				}
			}
		}
	}
}

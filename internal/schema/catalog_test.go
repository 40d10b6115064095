package schema_test

import (
	"context"
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

var update = flag.Bool("update", false, "write catalog.txt anew")

// matches compares a committed file with the wanted text, or writes it.
func matches(t *testing.T, file, want string) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(want), 0o644))
	}
	have, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Empty(t, differingLines(want, string(have)), "run: go generate .")
}

// differingLines are those of one text alone.
func differingLines(a, b string) []string {
	var lines []string
	for _, x := range [][2]string{{a, b}, {b, a}} {
		other := slices.Collect(strings.Lines(x[1]))
		for line := range strings.Lines(x[0]) {
			if !slices.Contains(other, line) {
				lines = append(lines, line)
			}
		}
	}
	return lines
}

// run runs a text of several statements under a schema's name.
func run(t *testing.T, pool *pgxpool.Pool, name, sql string) {
	t.Helper()
	n, err := schema.Parse(name)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), n.SQL(sql), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}

func read(t *testing.T, db schema.DB, name string) schema.Catalog {
	t.Helper()
	n, err := schema.Parse(name)
	require.NoError(t, err)
	c, err := schema.Current().Read(t.Context(), db, n)
	require.NoError(t, err)
	return c
}

// Under every name of the schema, and every search_path of the session.
func TestCatalog_EqualsAFreshSchema(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	for i, name := range []string{"metered", "money_1", "select", "s"} {
		run(t, pool, name, schema.Current().Source())
		c := read(t, pool, name)
		require.Equal(t, schema.Version, c.Version)
		if i == 0 {
			matches(t, "catalog.txt", c.Text())
		}
		require.Empty(t, differingLines(read(t, pool, "metered").Text(), c.Text()), name)
	}
	ctx := context.Background()
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	for _, path := range []string{"metered, public", "s, pg_catalog", "money_1, metered, pg_catalog, s"} {
		_, err := conn.Exec(ctx, "set search_path = "+path)
		require.NoError(t, err)
		require.Empty(t, differingLines(read(t, pool, "metered").Text(), read(t, conn, "metered").Text()), path)
		var after string
		require.NoError(t, conn.QueryRow(ctx, "show search_path").Scan(&after))
		require.Equal(t, path, after)
	}
	_, err = conn.Exec(ctx, "reset search_path")
	require.NoError(t, err)
}

// An entry that frees units marks the line of the jobs that wait for them. Whoever appends one without _append does so itself.
func TestCatalog_FunctionsThatFreeUnitsMarkTheLine(t *testing.T) {
	t.Parallel()
	function := regexp.MustCompile(`(?s)create function metered\.(\w+)\(.*?\n\$\$;`)
	entry := regexp.MustCompile(`(?s)insert into metered\.ledger\b.*?(?:on conflict|;)`)
	taking := regexp.MustCompile(`, '[ch]',`) // charges and holds free nothing
	freeing := 0
	for _, m := range function.FindAllStringSubmatch(schema.Current().Source(), -1) {
		for _, insert := range entry.FindAllString(m[0], -1) {
			if !taking.MatchString(insert) {
				freeing++
				require.Contains(t, m[0], "metered._mark_freed(", "%s: %s", m[1], insert)
			}
		}
	}
	require.GreaterOrEqual(t, freeing, 5)
}

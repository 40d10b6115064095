package privacy_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/privacy"
)

func TestExport_YieldsEachRowOfThePersonAndNoOther(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	planted(t, pool, "user/anna", 1)
	where := planted(t, pool, subject, 2)
	r := register(t, privacy.Config{})
	tables := map[string]int{}
	for row, err := range r.Export(t.Context(), pool, subject) {
		require.NoError(t, err)
		tables[row.Table]++
		var columns map[string]any
		require.NoError(t, json.Unmarshal(row.Row, &columns))
		for _, hidden := range []string{"fingerprint", "digest", "keys"} {
			require.NotContains(t, columns, hidden)
		}
		require.NotContains(t, string(row.Row), "user/anna")
		if row.Table == "operations" {
			require.Contains(t, columns["result"], subject, "the result is readable")
		}
		if row.Table == "job_keys" || row.Table == "newest" {
			require.Contains(t, columns, "key")
		}
	}
	for _, c := range where {
		table, _, _ := strings.Cut(c, " ")
		require.Equal(t, 1, tables[table], c)
	}
	for range r.Export(t.Context(), pool, subject) {
		break // the loop may end
	}
	require.Equal(t, 1, pgtest.Value[int](t, pool, "select 1"))
}

// A transition of a person's hold has no name of its own.
func TestExport_HasTheLinesAndTransitionsOfAPersonsHolds(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	book, err := holds.New(c.Budget, holds.Config{})
	require.NoError(t, err)
	for _, holder := range []string{subject, "user/bob"} {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := book.Place(t.Context(), tx, holds.Placement{ID: "h-" + holder[5:], Holder: holder, TTL: time.Minute,
				Lines: []holds.Line{{Scope: "room", Amount: 1}}})
			return err
		}))
	}
	tables := map[string]int{}
	for row, err := range register(t, privacy.Config{}).Export(t.Context(), pool, subject) {
		require.NoError(t, err)
		tables[row.Table]++
	}
	require.Equal(t, map[string]int{"holds": 1, "hold_lines": 1, "hold_events": 1}, tables)
}

// Operators that somebody put before those of pg_catalog, for other types, change no answer.
func TestExport_MeansTheSameOnAnySearchPath(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	planted(t, pool, subject, 1)
	count := func() (rows int) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "set local search_path = traps, pg_catalog")
			require.NoError(t, err)
			for _, err := range register(t, privacy.Config{}).Export(t.Context(), tx, subject) {
				require.NoError(t, err)
				rows++
			}
			return nil
		}))
		return rows
	}
	before := count()
	require.Positive(t, before)
	_, err := pool.Exec(t.Context(), `create schema traps;
		create function traps.never(anyelement, text) returns boolean language sql as $$ select false $$;
		create function traps.strpos(text, text) returns int language sql as $$ select 0 $$;
		create function traps.array_to_string(anyarray, text) returns text language sql as $$ select '' $$;
		create function traps.convert_from(bytea, text) returns text language sql as $$ select '' $$;
		create operator traps.~ (function = traps.never, leftarg = anyelement, rightarg = text)`)
	require.NoError(t, err)
	require.Equal(t, before, count())
}

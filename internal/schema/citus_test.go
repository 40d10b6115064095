package schema_test

import (
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

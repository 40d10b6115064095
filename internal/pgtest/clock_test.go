package pgtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

const readClock = "select metered.clock()"

var noon = time.Date(2031, 5, 6, 12, 0, 0, 123457000, time.UTC)

func TestSetClock_IsExactToTheMicrosecond(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	before := queryRow[time.Time](t, pool, "select clock_timestamp()")
	require.WithinRange(t, queryRow[time.Time](t, pool, readClock), before, before.Add(time.Minute))

	clock := pgtest.SetClock(t, pool, noon)
	check := func() {
		t.Helper()
		require.Equal(t, clock.Now().UnixMicro(), queryRow[time.Time](t, pool, readClock).UnixMicro())
	}
	check()
	require.Equal(t, noon, clock.Now())
	for range 100 {
		clock.Advance(time.Microsecond)
		check()
	}
	require.Equal(t, noon.Add(100*time.Microsecond), clock.Now())

	for _, at := range []time.Time{
		time.UnixMicro(0), time.UnixMicro(-1), time.Date(1999, 12, 31, 23, 59, 59, 999999000, time.UTC),
		time.Date(2000, 2, 29, 0, 0, 0, 1000, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC),
	} {
		clock.Set(at)
		check()
		require.True(t, clock.Now().Equal(at))
	}
	clock.Set(noon.Add(999 * time.Nanosecond))
	check()
	require.Equal(t, noon, clock.Now())
	clock.Advance(-time.Hour)
	check()
}

func TestClock_IsSeenByOpenTransactionsWithOldSnapshots(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	ctx := t.Context()

	// begin opens a transaction at each level and fixes its snapshot.
	begin := func(sql string) (txs []pgx.Tx) {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
			_, err = tx.Exec(ctx, sql)
			require.NoError(t, err)
			txs = append(txs, tx)
		}
		return txs
	}
	txs := begin("select count(*) from pg_class")
	clock := pgtest.SetClock(t, pool, noon)
	txs = append(txs, begin(readClock)...)

	for range 3 {
		clock.Advance(time.Hour)
		for i, tx := range txs {
			var at time.Time
			require.NoError(t, tx.QueryRow(ctx, readClock).Scan(&at))
			require.True(t, clock.Now().Equal(at), "transaction %d: %v", i, at)
		}
	}
}

func TestSetClock_IsSeenThroughACachedPlan(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), `create function what_time() returns timestamptz language plpgsql
		as $$ declare at timestamptz := metered.clock(); begin return at; end $$`)
	require.NoError(t, err)
	for range 10 {
		require.WithinDuration(t, time.Now(), queryRow[time.Time](t, pool, "select what_time()"), time.Hour)
	}
	clock := pgtest.SetClock(t, pool, noon)
	for range 10 {
		clock.Advance(time.Minute)
		require.True(t, clock.Now().Equal(queryRow[time.Time](t, pool, "select what_time()")))
	}
}

// The same clock for a role that owns nothing: it reads the time, and can neither move it nor replace the function.
func TestSetClock_OtherRolesOnlyRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, noon)

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	// Roles are the server's, not the database's: this one goes with the transaction.
	role := pgx.Identifier{"clock_reader_" + queryRow[string](t, pool, "select current_database()::text")}.Sanitize()
	for _, sql := range []string{
		"create role " + role, "grant usage on schema metered to " + role,
		"grant execute on function metered.clock() to " + role, "set local role " + role,
	} {
		_, err := tx.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	var at time.Time
	require.NoError(t, tx.QueryRow(t.Context(), readClock).Scan(&at))
	require.True(t, clock.Now().Equal(at))

	for _, sql := range []string{
		"select setval('pgtest.clock', 0)",
		"create or replace function metered.clock() returns timestamptz language sql as 'select now()'",
	} {
		nested, err := tx.Begin(t.Context())
		require.NoError(t, err)
		_, err = nested.Exec(t.Context(), sql)
		require.ErrorContains(t, err, "42501", sql)
		require.NoError(t, nested.Rollback(t.Context()))
	}
}

func TestSetClock_FollowsTheSchemasName(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	_, err := pool.Exec(t.Context(), `create schema "Other"; create function "Other".clock() returns timestamptz
		language sql volatile as 'select clock_timestamp()'`)
	require.NoError(t, err)
	clock := pgtest.SetClock(t, pool, noon)
	require.True(t, clock.Now().Equal(queryRow[time.Time](t, pool, `select "Other".clock()`)))
}

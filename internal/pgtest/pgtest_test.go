package pgtest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

func TestOpen_ParallelTestsSeeOnlyTheirOwnRows(t *testing.T) {
	t.Parallel()
	for i := range 8 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Open(t)
			_, err := pool.Exec(t.Context(), "create table mine (i int)")
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), "insert into mine values ($1)", i)
			require.NoError(t, err)
			require.Equal(t, i, queryRow[int](t, pool, "select i from mine"))
		})
	}
}

func TestOpen_HoldsTheSchemaAndRiver(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for _, object := range []string{"metered.schema_version", "river_job"} {
		require.True(t, queryRow[bool](t, pool, "select to_regclass($1) is not null", object), object)
	}
}

func TestOpen_NamesTheTestAsApplication(t *testing.T) {
	t.Parallel()
	require.Equal(t, t.Name(), queryRow[string](t, pgtest.Open(t), "show application_name"))

	t.Run(strings.Repeat("ü", 40), func(t *testing.T) {
		name := queryRow[string](t, pgtest.Open(t), "show application_name")
		require.NotEmpty(t, name)
		require.LessOrEqual(t, len(name), 63)
	})
}

func TestOpen_DropsTheDatabaseWhenTheTestEnds(t *testing.T) {
	t.Parallel()
	outer := pgtest.Open(t)
	const exists = "select exists (select from pg_database where datname = $1)"
	var name string
	t.Run("inner", func(t *testing.T) {
		name = queryRow[string](t, pgtest.Open(t), "select current_database()::text")
		require.True(t, queryRow[bool](t, outer, exists, name))
	})
	require.False(t, queryRow[bool](t, outer, exists, name))
}

func TestOpenWith_EmptyHasNoSchema(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	require.True(t, queryRow[bool](t, pool, "select to_regnamespace('metered') is null and to_regclass('river_job') is null"))
	require.Equal(t, "UTF8", queryRow[string](t, pool, "show server_encoding"))
}

func TestOpenWith_Config(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{MaxConns: 3, Config: func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["work_mem"] = "7MB"
	}})
	require.EqualValues(t, 3, pool.Config().MaxConns)
	require.Equal(t, "7MB", queryRow[string](t, pool, "show work_mem"))
	require.EqualValues(t, 16, pgtest.Open(t).Config().MaxConns)
}

func TestConnString_ReachesTheSameDatabase(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	conn, err := pgx.Connect(t.Context(), pgtest.ConnString(pool))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var name string
	require.NoError(t, conn.QueryRow(t.Context(), "select current_database()").Scan(&name))
	require.Equal(t, queryRow[string](t, pool, "select current_database()::text"), name)
}

func queryRow[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rows, err := pool.Query(ctx, sql, args...)
	require.NoError(t, err)
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return value
}

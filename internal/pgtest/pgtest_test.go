package pgtest_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

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

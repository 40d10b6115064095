package exampledb_test

import (
	"context"
	"io"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/internal/pgserver"
)

func TestOpen_MakesADatabaseAndCloseRemovesIt(t *testing.T) {
	server, err := pgserver.Start(t.Context(), pgserver.Options{TCP: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	t.Setenv("DATABASE_URL", server.ConnString())
	conn, err := pgx.Connect(t.Context(), server.ConnString())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	exists := func(name string) (there bool) {
		require.NoError(t, conn.QueryRow(t.Context(), `select exists (select from pg_database where datname = $1)`, name).Scan(&there))
		return there
	}

	db, err := exampledb.Open(t.Context(), "trial", exampledb.Options{Jobs: true, SQL: `create table own ()`, Log: io.Discard})
	require.NoError(t, err)
	var name string
	require.NoError(t, db.Pool.QueryRow(t.Context(), `
		select current_database() where (select count(*) from own) + (select count(*) from river_job) + (select count(*) from metered.ledger) = 0`).Scan(&name))
	require.Regexp(t, `^metered_trial_`, name)
	other, err := pgx.Connect(t.Context(), db.ConnString())
	require.NoError(t, err)
	require.Equal(t, name, other.Config().Database)
	require.True(t, exists(name))
	require.NoError(t, db.Close(), "also while somebody else is connected")
	require.False(t, exists(name))
	_ = other.Close(t.Context())

	_, err = exampledb.Open(t.Context(), "trial", exampledb.Options{SQL: `no SQL`, Log: io.Discard})
	require.Error(t, err)
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from pg_database where datname like 'metered\_trial\_%'`).Scan(&left))
	require.Zero(t, left, "of one that could not be filled")
}

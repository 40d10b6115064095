package exampledb_test

import (
	"context"
	"io"
	"testing"
	"time"

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

// The server has made the database, and says so only when it is too late.
func TestOpen_InterruptedWhileTheDatabaseIsMadeLeavesNone(t *testing.T) {
	server, err := pgserver.Start(t.Context(), pgserver.Options{Private: true, Durable: true, TCP: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	t.Setenv("DATABASE_URL", server.ConnString())
	conn, err := pgx.Connect(t.Context(), server.ConnString())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	run := func(sql string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	run(`alter system set synchronous_standby_names = 'nobody'`) // a commit waits until it is there, or is not wanted any more
	run(`select pg_reload_conf()`)

	ctx, interrupt := context.WithCancel(t.Context())
	opened := make(chan error, 1)
	go func() {
		_, err := exampledb.Open(ctx, "trial", exampledb.Options{Log: io.Discard})
		opened <- err
	}()
	count := func(sql string) (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool {
		return count(`select count(*) from pg_stat_activity where wait_event = 'SyncRep' and query like 'create database%'`) == 1
	}, time.Minute, time.Millisecond)
	interrupt()
	select {
	case <-opened:
		t.Fatal("it gave up before it knew")
	case <-time.After(200 * time.Millisecond): // as it would by now
	}
	run(`alter system reset synchronous_standby_names`)
	run(`select pg_reload_conf()`)
	require.ErrorIs(t, <-opened, context.Canceled)
	require.Zero(t, count(`select count(*) from pg_database where datname like 'metered\_trial\_%'`))
}

func TestClose_WaitsNotForEverForAConnectionThatIsInUse(t *testing.T) {
	db, err := exampledb.Open(t.Context(), "trial", exampledb.Options{CloseTimeout: time.Millisecond, Log: io.Discard})
	require.NoError(t, err)
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	closed := make(chan error, 1)
	go func() { closed <- db.Close() }()
	select {
	case err := <-closed:
		require.ErrorContains(t, err, "still in use")
	case <-time.After(time.Minute):
		t.Error("it waits")
	}
	require.Error(t, conn.Ping(t.Context()), "it was cut")
	conn.Release()
}

package replica_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/replica"
)

// A standby shows commits in the order of the log, and a primary as they end: one that waits for a standby is hidden there while a later one is
// seen. So a reader of the standby and one of the primary see two charges in opposite orders. Each state adds up, a position has all before
// it, and no standby decides: it refuses what writes.
func TestReadAt_APrimaryAndAStandbyShowCommitsInOppositeOrders(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	opts := pgserver.Options{Private: true, Settings: map[string]string{"synchronous_commit": "remote_apply"}}
	server, primary := pgtest.Start(t, opts)
	standbys := []*pgxpool.Pool{pgtest.Standby(t, server, opts), pgtest.Standby(t, server, opts)}
	near, far := standbys[0], standbys[1] // any of them is synchronous
	exec := func(db *pgxpool.Pool, statements ...string) {
		for _, sql := range statements {
			_, err := db.Exec(ctx, sql)
			require.NoError(t, err, sql)
		}
	}
	c, err := metered.New(primary, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	require.NoError(t, err)
	charge := func(tx pgx.Tx, scope string) error {
		_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1})
		return err
	}
	seen := func(db budget.Querier) (all [2]int64) {
		u, err := c.Budget.Usage(ctx, db, budget.Query{Scope: "first"}, budget.Query{Scope: "second"})
		require.NoError(t, err)
		if pool, ok := db.(*pgxpool.Pool); ok {
			report, err := c.Budget.Verify(ctx, pool, budget.VerifyOptions{})
			require.NoError(t, err)
			require.Empty(t, report.Differences)
		}
		return [2]int64{u[0].Spent, u[1].Spent}
	}
	received := func(db *pgxpool.Pool, lsn replica.LSN) bool {
		return pgtest.Value[bool](t, db, "select pg_last_wal_receive_lsn() >= $1::text::pg_lsn", lsn.String())
	}

	// The near standby has the first charge, and no longer reports it: its receiver is stopped before it applies the charge.
	exec(near, "select pg_wal_replay_pause()")
	exec(far, "select pg_wal_replay_pause()")
	exec(primary, "alter system set synchronous_standby_names = '"+pgserver.StandbyName+"'", "select pg_reload_conf()")
	pgtest.WaitFor(t, "commits to wait", func() bool {
		return pgtest.Value[bool](t, primary, "select exists (select from pg_stat_replication where sync_state = 'sync')")
	})
	first := make(chan error, 1)
	go func() {
		first <- pgx.BeginFunc(ctx, primary, func(tx pgx.Tx) error { return charge(tx, "first") })
	}()
	pgtest.WaitFor(t, "the first charge to wait for the standbys", func() bool {
		return pgtest.Value[bool](t, primary, "select exists (select from pg_stat_activity where wait_event = 'SyncRep')")
	})
	at, err := replica.CommitLSN(ctx, primary)
	require.NoError(t, err)
	pgtest.WaitFor(t, "the log", func() bool { return received(near, at) && received(far, at) })
	stop := pgtest.Value[int](t, near, "select pid from pg_stat_activity where backend_type = 'walreceiver'")
	require.NoError(t, syscall.Kill(stop, syscall.SIGSTOP))
	exec(near, "select pg_wal_replay_resume()")
	require.NoError(t, pgx.BeginFunc(ctx, primary, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "set local synchronous_commit = local")
		return errors.Join(err, charge(tx, "second"))
	}))
	pgtest.WaitFor(t, "the first charge on the standby", func() bool { return seen(near)[0] == 1 })

	require.Equal(t, [2]int64{1, 0}, seen(near), "the near standby")
	require.Equal(t, [2]int64{0, 1}, seen(primary), "the primary")
	require.Equal(t, [2]int64{0, 0}, seen(far), "the far standby, which has replayed nothing")

	for _, db := range standbys {
		_, err := c.Budget.ChargeNow(ctx, db, budget.Charge{Scope: "first", Amount: 1})
		require.Equal(t, sqlstate.ReadOnlyTransaction, sqlstate.Of(err), "a standby decides nothing: %v", err)
	}

	// A position after the second charge has the first, too, wherever it is read.
	position, err := replica.CommitLSN(ctx, primary)
	require.NoError(t, err)
	require.ErrorIs(t, replica.ReadAt(ctx, far, position, 10*time.Millisecond, noRead), replica.ErrStale)
	exec(far, "select pg_wal_replay_resume()")
	require.NoError(t, syscall.Kill(stop, syscall.SIGCONT))
	for _, db := range standbys {
		require.NoError(t, replica.ReadAt(ctx, db, position, time.Minute, func(ctx context.Context, conn *pgx.Conn) error {
			require.Equal(t, [2]int64{1, 1}, seen(conn))
			return nil
		}))
	}
	require.NoError(t, <-first)
	require.Equal(t, [2]int64{1, 1}, seen(primary))
}

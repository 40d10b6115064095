package budget_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// wide charges 1,000 scopes of its own a unit each.
func wide(name string) (all []budget.Charge) {
	for i := range 1000 {
		all = append(all, budget.Charge{Scope: fmt.Sprintf("%s/%d", name, i), Amount: 1})
	}
	return all
}

// roomy is a server of the default size, whose lock table has some 7,000 locks for all programs on it.
func roomy(t *testing.T) *pgxpool.Pool {
	t.Helper()
	_, pool := pgtest.Start(t, pgserver.Options{Settings: map[string]string{"max_connections": "100", "max_locks_per_transaction": "64"}})
	return pgtest.Reopen(t, pool, func(c *pgxpool.Config) { c.MaxConns = 40 })
}

// Of 16 transactions that lock 1,000 scopes each, as many go on as the lock table has room for, and the others wait:
// none fails, nor does another program's.
func TestChargeEach_ManyBatchesLeaveRoomInTheLockTable(t *testing.T) {
	t.Parallel()
	pool := roomy(t)
	l := newLedger(t, budget.Config{LockTimeout: 10 * time.Minute})
	const batches = 16
	var charged, failed atomic.Int64
	var all sync.WaitGroup
	commit, errs := make(chan struct{}), make([]error, batches)
	end := sync.OnceFunc(func() { close(commit) })
	defer end()
	for i := range batches {
		all.Go(func() {
			_, errs[i] = pgtest.InTx(t.Context(), pool, func(tx pgx.Tx) (any, error) {
				results, err := l.ChargeEach(t.Context(), tx, wide(fmt.Sprint(i))...)
				if err == nil {
					err = results[999].Err
				}
				if charged.Add(1); err != nil {
					failed.Add(1)
				}
				<-commit
				return nil, err
			})
		})
	}
	pgtest.WaitFor(t, "all to have what they get, or to wait", func() bool { // all have what they get, or wait
		if failed.Load() > 0 {
			return true
		}
		waiting, err := pgtest.InTx(t.Context(), pool, func(tx pgx.Tx) (n int64, err error) {
			err = tx.QueryRow(t.Context(), `select count(*) from pg_stat_activity where wait_event = 'PgSleep'`).Scan(&n)
			return n, err
		})
		return err == nil && charged.Load()+waiting == batches
	})
	require.Zero(t, failed.Load())
	require.Greater(t, charged.Load(), int64(2))
	var locks int64
	err := pool.QueryRow(t.Context(), `select count(*) from pg_locks where locktype = 'advisory'`).Scan(&locks)
	require.NoError(t, err)
	require.Less(t, locks, int64(5000))
	_, err = pool.Exec(t.Context(), `select pg_advisory_xact_lock(x) from generate_series(1, 1200) x`)
	require.NoError(t, err, "another program has the last quarter")

	// A client that waits for too long, or whose context ends, is told what it waits for.
	hasty := newLedger(t, budget.Config{LockTimeout: 50 * time.Millisecond})
	_, err = pgtest.InTx(t.Context(), pool, func(tx pgx.Tx) (any, error) { return hasty.ChargeEach(t.Context(), tx, wide("hasty")...) })
	require.ErrorIs(t, err, budget.ErrBusy)
	require.ErrorContains(t, err, "no room for 1000 locks")
	require.True(t, metered.Retryable(err))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = pgtest.InTx(ctx, pool, func(tx pgx.Tx) (any, error) { return l.ChargeEach(ctx, tx, wide("ended")...) })
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = pool.Exec(t.Context(), `select metered._lock_each(array(select generate_series(1, 1000)), 50, true)`)
	require.ErrorContains(t, err, "no room for 1000 locks", "a lane of a Batcher, which skips busy scopes")
	// What is small does not ask.
	_, err = pgtest.InTx(t.Context(), pool, func(tx pgx.Tx) (any, error) { return hasty.ChargeEach(t.Context(), tx, wide("small")[:64]...) })
	require.NoError(t, err)

	end()
	all.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.EqualValues(t, batches*1000+64, count(t, pool, "metered.ledger"))

	// One transaction may make several batches: with all of the room it goes on, since no other batch has any.
	_, err = pgtest.InTx(t.Context(), pool, func(tx pgx.Tx) (any, error) {
		for i := range 6 {
			if _, err := hasty.ChargeEach(t.Context(), tx, wide(fmt.Sprint("more ", i))...); err != nil {
				return nil, err
			}
		}
		return nil, tx.QueryRow(t.Context(), `select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()`).Scan(&locks)
	})
	require.NoError(t, err)
	require.EqualValues(t, 6000+18, locks, "each unit of the room is taken once")
}

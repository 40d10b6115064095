package budget_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func one(scope string) budget.Charge {
	return budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1000)}}
}

// occupy charges scopes in a transaction that stays open.
func occupy(t *testing.T, pool *pgxpool.Pool, l *budget.Ledger, scopes ...string) pgx.Tx {
	t.Helper()
	tx := begin(t, pool, pgx.ReadCommitted)
	for _, scope := range scopes {
		_, err := l.Charge(t.Context(), tx, one(scope))
		require.NoError(t, err)
	}
	return tx
}

func lockTimeout(t *testing.T, db budget.Querier) (setting string) {
	t.Helper()
	require.NoError(t, db.QueryRow(t.Context(), "select current_setting('lock_timeout')").Scan(&setting))
	return setting
}

func TestLock_TimeoutIsBusyWithinItsBounds(t *testing.T) {
	t.Parallel()
	ctx, cancel := pgtest.Patient(t)
	defer cancel()
	pool, _, _ := open(t)
	const wait = 150 * time.Millisecond
	l := newLedger(t, budget.Config{LockTimeout: wait})
	occupy(t, pool, l, "a")
	occupy(t, pool, l, "b")
	for name, write := range map[string]func(tx pgx.Tx) error{
		"charge": func(tx pgx.Tx) error { _, err := l.Charge(ctx, tx, one("a")); return err },
		"both":   func(tx pgx.Tx) error { _, err := l.Charge(ctx, tx, one("a"), one("b")); return err },
		"credit": func(tx pgx.Tx) error { _, err := l.Credit(ctx, tx, budget.Credit{Scope: "a", Amount: 1}); return err },
		"refund": func(tx pgx.Tx) error {
			_, err := l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: 1, Amount: 1})
			return err
		},
		"lock":   func(tx pgx.Tx) error { return l.Lock(ctx, tx, "c", "a") },
		"repair": func(tx pgx.Tx) error { _, err := l.RepairClock(ctx, tx, "a", budget.Note{}); return err },
	} {
		tx := begin(t, pool, pgx.ReadCommitted)
		began := time.Now()
		err := write(tx)
		took := time.Since(began)
		require.ErrorIs(t, err, budget.ErrBusy, name)
		require.GreaterOrEqual(t, took, wait, name)
		require.NoError(t, tx.Rollback(ctx))
	}
	require.Zero(t, usage(t, pool, l, "a", 0).Seq)
}

// Each of two transactions takes the same two scopes' locks at once, and then uses them
// one by one, the other way round.
func TestLock_KeepsCallsInOppositeOrdersFromDeadlock(t *testing.T) {
	t.Parallel()
	pool, _, _ := open(t)
	l := newLedger(t, budget.Config{LockTimeout: time.Minute})
	const each = 20
	errs := make(chan error)
	for _, scopes := range [][]string{{"a", "b"}, {"b", "a"}, {"a", "b"}, {"b", "a"}} {
		go func() {
			var err error
			for range each {
				err = errors.Join(err, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					if err := l.Lock(t.Context(), tx, scopes[0], scopes[1], scopes[0]); err != nil {
						return err
					}
					if _, err := l.Credit(t.Context(), tx, budget.Credit{Scope: scopes[0], Amount: 2}); err != nil {
						return err
					}
					_, err := l.Charge(t.Context(), tx, one(scopes[1]))
					return err
				}))
			}
			errs <- err
		}()
	}
	for range 4 {
		require.NoError(t, <-errs)
	}
	for _, scope := range []string{"a", "b"} {
		require.Equal(t, int64(2*each*(1-2)), usage(t, pool, l, scope, 0).Used)
	}
}

// The bound is for all locks of a call together.
func TestLock_TimeoutCoversAllScopesOfACall(t *testing.T) {
	t.Parallel()
	ctx, cancel := pgtest.Patient(t)
	defer cancel()
	pool, _, _ := open(t)
	l := newLedger(t, budget.Config{LockTimeout: 500 * time.Millisecond})
	scopes := []string{"a", "b", "c", "d"}
	var holders []pgx.Tx
	var charges []budget.Charge
	for _, scope := range scopes {
		holders = append(holders, occupy(t, pool, l, scope))
		charges = append(charges, one(scope))
	}
	tx := begin(t, pool, pgx.ReadCommitted)
	busy := pgtest.Going(func() error { _, err := l.Charge(ctx, tx, charges...); return err })
	pgtest.WaitQueued(t, pool, 1)
	began := time.Now()
	// Each is given free before a time limit of its own would be up, and not before the call waits for it: a lock that is free is taken in no time.
	call, err := prepareCharges(l, charges...)
	require.NoError(t, err)
	for n, key := range call.Locks.Keys {
		pgtest.WaitFor(t, "the call to wait for a lock, or to give up", func() bool { return len(busy) > 0 || awaited(t, pool, key) })
		time.Sleep(time.Until(began.Add(time.Duration(n+1) * 200 * time.Millisecond))) // lock_timeout counts real time
		for i, scope := range scopes {
			own, err := prepareCharges(l, one(scope))
			require.NoError(t, err)
			if own.Locks.Keys[0] == key {
				require.NoError(t, holders[i].Rollback(ctx))
			}
		}
	}
	require.ErrorIs(t, <-busy, budget.ErrBusy)
}

// awaited reports whether a session of the database waits for a lock.
func awaited(t *testing.T, pool *pgxpool.Pool, key int64) bool {
	t.Helper()
	return pgtest.Value[bool](t, pool, `select exists (select from pg_locks where locktype = 'advisory' and not granted and objsubid = 1
		and (classid::bigint << 32 | objid::bigint) = $1 and database = (select oid from pg_database where datname = current_database()))`, key)
}

func TestLock_SessionsOwnTimeoutIsUnchangedAfterwards(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(ctx, "set lock_timeout = '7s'")
	require.NoError(t, err)

	// After a wait that ended well.
	holder := occupy(t, pool, l, "a")
	tx, err := conn.Begin(ctx)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, "set local lock_timeout = '8s'")
	require.NoError(t, err)
	late := pgtest.Going(func() error { _, err := l.Charge(ctx, tx, one("a")); return err })
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, holder.Commit(ctx))
	require.NoError(t, <-late)
	require.Equal(t, "8s", lockTimeout(t, tx))
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, "7s", lockTimeout(t, conn))

	// After a wait that did not, inside a savepoint.
	impatient := newLedger(t, budget.Config{LockTimeout: 10 * time.Millisecond})
	occupy(t, pool, l, "a")
	tx, err = conn.Begin(ctx)
	require.NoError(t, err)
	err = pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) error { _, err := impatient.Charge(ctx, inner, one("a")); return err })
	require.ErrorIs(t, err, budget.ErrBusy)
	require.Equal(t, "7s", lockTimeout(t, tx))
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, "7s", lockTimeout(t, conn))
}

func TestLock_RolledBackSavepointTakesTheChargeAndTheLockBack(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	limit := budget.Lifetime(2)
	c := budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}}
	tx := begin(t, pool, pgx.ReadCommitted)
	savepoint, err := tx.Begin(ctx)
	require.NoError(t, err)
	_, err = l.Charge(ctx, savepoint, c)
	require.NoError(t, err)
	require.NoError(t, savepoint.Rollback(ctx))

	// The lock went with the savepoint: another session passes.
	mustCharge(t, pool, l, "a", 1, limit)

	// And is taken again: another session queues, and is refused in the end.
	r, err := l.Charge(ctx, tx, c)
	require.NoError(t, err)
	require.Equal(t, int64(2), r.Entries[0].Seq)
	late := pgtest.Going(func() error { _, err := charge(ctx, pool, l, "a", 1, limit); return err })
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, tx.Commit(ctx))
	require.ErrorIs(t, <-late, budget.ErrExceeded)
	require.Equal(t, int64(2), usage(t, pool, l, "a", 0).Used)
	requireVerified(t, pool, l)
}

func TestLock_IsTakenOncePerScopeInTheOrderOfKeys(t *testing.T) {
	t.Parallel()
	l := newLedger(t, budget.Config{})
	var charges []budget.Charge
	for _, scope := range []string{"d", "a", "c", "b", "a", "d"} {
		charges = append(charges, budget.Charge{Scope: scope, Amount: 1})
	}
	call, err := prepareCharges(l, charges...)
	require.NoError(t, err)
	require.Equal(t, []string{"d", "a", "c", "b"}, call.Locks.Scopes)
	keys := call.Locks.Keys
	require.Len(t, keys, 4)
	require.IsIncreasing(t, keys)
}

// The keys are part of the protocol between releases that run side by side.
func TestLock_KeysAreGolden(t *testing.T) {
	t.Parallel()
	for _, golden := range []struct {
		schema, scope string
		key           int64
	}{
		{"", "org/acme", 3775460004313942042},
		{"metered", "org/acme", 3775460004313942042},
		{"billing", "org/acme", -8832022346701570808},
		{"", "seat/21A/2026-11-21T20:00", -63737232852353835},
	} {
		l := newLedger(t, budget.Config{Schema: golden.schema})
		call, err := prepareCharges(l, one(golden.scope))
		require.NoError(t, err)
		require.Equal(t, []int64{golden.key}, call.Locks.Keys, "%s %s", golden.schema, golden.scope)
	}
}

func TestLock_AShorterTimeoutOfTheSessionBoundsTheWait(t *testing.T) {
	t.Parallel()
	ctx, cancel := pgtest.Patient(t)
	defer cancel()
	pool, _, _ := open(t)
	l := newLedger(t, budget.Config{LockTimeout: time.Hour})
	occupy(t, pool, l, "a")
	tx := begin(t, pool, pgx.ReadCommitted)
	_, err := tx.Exec(ctx, "set local lock_timeout = '50ms'")
	require.NoError(t, err)
	_, err = l.Charge(ctx, tx, one("a"))
	require.ErrorIs(t, err, budget.ErrBusy)
}

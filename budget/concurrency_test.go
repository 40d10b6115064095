package budget_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

var isolations = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// retrier runs transactions and tries them again where Postgres says that they
// may be: 40001 and 40P01, nothing else.
type retrier struct {
	pool    *pgxpool.Pool
	retries atomic.Int64
}

func (r *retrier) run(ctx context.Context, iso pgx.TxIsoLevel, f func(tx pgx.Tx) error) error {
	const attempts = 2000
	var err error
	for range attempts {
		err = pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{IsoLevel: iso}, f)
		if c := code(err); c != sqlstate.SerializationFailure && c != sqlstate.DeadlockDetected {
			return err
		}
		r.retries.Add(1)
		if err := pause.Before(ctx, 1); err != nil { // without it the losers collide again
			return err
		}
	}
	return fmt.Errorf("gave up after %d attempts: %w", attempts, err)
}

func TestCharge_ConcurrentCallersNeverExceedTheLimit(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, locks := range []bool{true, false} {
		pool := pgtest.Open(t)
		if !locks {
			withoutLocks(t, pool)
		}
		for _, level := range []string{"read committed", "repeatable read", "serializable", "mixed"} {
			t.Run(fmt.Sprintf("%s, locks %v", level, locks), func(t *testing.T) {
				isolation := func(n int) pgx.TxIsoLevel {
					if level == "mixed" {
						return isolations[n%len(isolations)]
					}
					return pgx.TxIsoLevel(level)
				}
				race(t, pool, level, isolation, locks)
			})
		}
		requireVerified(t, pool, newLedger(t, budget.Config{}))
	}
}

// race lets workers make more charges of a scope than it has room for, of 1 unit and of 1 to 7, the last of them of 1 unit
// again: then every unit is sold. The short form finds a charge that does not collide (_write_charges without _collided).
//
// All workers have a snapshot before the first of them charges, so that above READ COMMITTED some collide.
func race(t *testing.T, pool *pgxpool.Pool, level string, isolation func(n int) pgx.TxIsoLevel, locks bool) {
	workers, attempts, limit := pgtest.Size(4, 8), pgtest.Size(12, 24), pgtest.Size(int64(22), 90)
	ctx := t.Context()
	l := newLedger(t, budget.Config{})
	retry := &retrier{pool: pool}
	for _, amounts := range []string{"units", "mixed"} {
		scope := level + " " + amounts
		var admitted, units, refused atomic.Int64
		var ready sync.WaitGroup
		ready.Add(workers)
		require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
			meet := sync.OnceFunc(func() { ready.Done(); ready.Wait() })
			for n := range attempts {
				amount := int64(1)
				if amounts == "mixed" && n < attempts/2 {
					amount = []int64{7, 5, 3, 2, 1}[(n+worker)%5]
				}
				c := budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.PerWindow(limit, time.Hour), budget.Lifetime(limit)}}
				err := retry.run(ctx, isolation(worker+n), func(tx pgx.Tx) error {
					// Something before it, so that the snapshot is older than the charge.
					if _, err := tx.Exec(ctx, "select 1"); err != nil {
						return err
					}
					meet()
					_, err := l.Charge(ctx, tx, c)
					return err
				})
				var exceeded *budget.ExceededError
				switch {
				case err == nil:
					admitted.Add(1)
					units.Add(amount)
				case errors.As(err, &exceeded):
					if exceeded.Refusals[0].Available >= amount {
						return fmt.Errorf("refused %d with %d available", amount, exceeded.Refusals[0].Available)
					}
					refused.Add(1)
				default:
					return err
				}
			}
			return nil
		}), "only 40001 and 40P01 may come up, never 23505")

		require.Equal(t, limit, units.Load())
		require.Equal(t, int64(workers*attempts), admitted.Load()+refused.Load())
		require.Equal(t, limit, usage(t, pool, l, scope, 0).Used)
		require.Equal(t, limit, usage(t, pool, l, scope, time.Hour).Used)
		var sum, count int64
		for e, err := range l.Entries(ctx, pool, scope, budget.EntriesOptions{}) {
			require.NoError(t, err)
			sum += e.Amount
			count++
		}
		require.Equal(t, limit, sum)
		require.Equal(t, admitted.Load(), count)
	}
	switch {
	case level != "read committed":
		require.Positive(t, retry.retries.Load(), "the guard was never needed: this test proves nothing")
	case locks:
		require.Zero(t, retry.retries.Load(), "at read committed writers queue and never fail")
	}
}

// Without the lock, the second writer sees the first one's entry only by colliding with it.
func TestCharge_CollisionIsASerializationFailure(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	withoutLocks(t, pool)
	theFullWay(t, pool)
	l := newLedger(t, budget.Config{})
	one := func(scope string) budget.Charge {
		return budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(3)}}
	}
	for _, iso := range isolations {
		for _, before := range []int{0, 1, 2} {
			scope := fmt.Sprintf("%s, %d before", iso, before)
			chargeMany(t, pool, l, scope, before)
			first, second := begin(t, pool, iso), begin(t, pool, iso)
			_, err := second.Exec(ctx, "select 1")
			require.NoError(t, err)
			_, err = l.Charge(ctx, first, one(scope))
			require.NoError(t, err)
			late := pgtest.Going(func() error {
				_, err := l.Charge(ctx, second, one(scope))
				return err
			})
			pgtest.WaitQueued(t, pool, 1)
			require.NoError(t, first.Commit(ctx))
			require.Equal(t, sqlstate.SerializationFailure, code(<-late))
			require.Equal(t, int64(before+1), usage(t, pool, l, scope, 0).Used)
		}
	}
	requireVerified(t, pool, l)
}

func TestCharge_ManyScopesInOppositeOrdersDoNotDeadlock(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	l := newLedger(t, budget.Config{})
	workers, attempts := pgtest.Size(6, 12), 15
	scopes := []string{"a", "b", "c", "d", "e"}
	require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
		for range attempts {
			var charges []budget.Charge
			for _, i := range pgtest.Random(t).Perm(len(scopes)) {
				charges = append(charges, budget.Charge{Scope: scopes[i], Amount: 1})
			}
			err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := l.Charge(ctx, tx, charges...)
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	for _, scope := range scopes {
		require.Equal(t, int64(workers*attempts), usage(t, pool, l, scope, 0).Spent)
	}
	requireVerified(t, pool, l)
}

// A transaction with an old snapshot saw the scope with so many entries. Since then 64 more were added, and a purge
// took all it could: also every entry that a charge on the old state would collide with, except entry 1.
func TestCharge_OldSnapshotNeverGetsPastAPurge(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			ctx := t.Context()
			total := budget.Lifetime(50)
			for _, seen := range pgtest.Size([]int{0, 1, 15, 16, 17, 40}, []int{0, 1, 2, 3, 15, 16, 17, 18, 33, 40}) {
				scope := fmt.Sprintf("%s, seen %d", iso, seen)
				chargeMany(t, pool, l, scope, seen)
				var old [3]pgx.Tx
				for i := range old {
					old[i] = begin(t, pool, iso)
					require.Equal(t, int64(seen), usage(t, old[i], l, scope, 0).Seq) // takes the snapshot
				}
				chargeMany(t, pool, l, scope, 64)
				clock.Advance(time.Hour)
				purge(t, pool, l, time.Minute)

				_, err := l.Charge(ctx, old[0], budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{total}})
				require.Equal(t, sqlstate.SerializationFailure, code(err), "charge after seeing %d: %v", seen, err)
				_, err = l.Credit(ctx, old[1], budget.Credit{Scope: scope, Amount: 1})
				require.Equal(t, sqlstate.SerializationFailure, code(err), "credit after seeing %d: %v", seen, err)
				if seen > 0 {
					_, err = l.Refund(ctx, old[2], budget.Refund{Scope: scope, Seq: 1, Amount: 1})
					require.Equal(t, sqlstate.SerializationFailure, code(err), "refund after seeing %d: %v", seen, err)
				}
				for _, tx := range old {
					require.NoError(t, tx.Rollback(ctx))
				}
				require.Equal(t, int64(seen+64), usage(t, pool, l, scope, 0).Used)
			}
		})
	}
	requireVerified(t, pool, l)
}

// At READ COMMITTED a statement's snapshot can be as old, if it waits for a row.
// Only without the lock: with it, the snapshot is taken after the wait.
func TestCharge_WaitingForAPurgedEntryIsASerializationFailure(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	withoutLocks(t, pool)
	theFullWay(t, pool)
	for _, seen := range []int{0, 1, 2, 16, 17, 40} {
		for _, purgedBefore := range []bool{false, true} {
			scope := fmt.Sprintf("seen %d, %v", seen, purgedBefore)
			chargeMany(t, pool, l, scope, seen)
			if purgedBefore {
				chargeMany(t, pool, l, scope, 40)
				clock.Advance(time.Hour)
				purge(t, pool, l, time.Minute)
			}
			before := usage(t, pool, l, scope, 0).Used

			first := begin(t, pool, pgx.ReadCommitted)
			chargeMany(t, first, l, scope, 64)
			clock.Advance(time.Hour)
			_, err := first.Exec(ctx, `select metered.purge_scope($1, metered._scope_key($1), metered.clock(), 0, 5000, 1000, false)`, scope)
			require.NoError(t, err)
			late := []<-chan error{
				pgtest.Going(func() error {
					_, err := charge(ctx, pool, l, scope, 1, budget.Lifetime(50))
					return err
				}),
				pgtest.Going(func() error { return refund(ctx, pool, l, scope, before+1, 1) }),
			}
			if before == 0 {
				require.ErrorIs(t, <-late[1], budget.ErrUnknownEntry)
				late = late[:1]
			}
			pgtest.WaitQueued(t, pool, len(late))
			require.NoError(t, first.Commit(ctx))
			for _, err := range late {
				require.Equal(t, sqlstate.SerializationFailure, code(<-err), scope)
			}
			require.Equal(t, before+64, usage(t, pool, l, scope, 0).Used)
		}
	}
	requireVerified(t, pool, l)
}

// Transactions that look at a scope, dawdle, and then charge it, while a purge
// deletes all it can, over and over.
func TestCharge_NeverExceedsWhilePurgesRun(t *testing.T) {
	t.Parallel()
	for _, locks := range []bool{true, false} {
		t.Run(fmt.Sprintf("locks %v", locks), func(t *testing.T) {
			t.Parallel()
			const workers, attempts, limit = 6, 25, 100
			ctx := t.Context()
			pool := pgtest.Open(t)
			if !locks {
				withoutLocks(t, pool)
				theFullWay(t, pool) // the short way has the lock, or writes nothing
			}
			l := newLedger(t, budget.Config{})
			retry := &retrier{pool: pool}
			stop := make(chan struct{})
			var purged int64
			purging := pgtest.Going(func() error {
				for {
					select {
					case <-stop:
						return nil
					default:
					}
					r, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Microsecond, Batch: 16})
					if c := code(err); err != nil && c != sqlstate.SerializationFailure && c != sqlstate.DeadlockDetected {
						return err
					}
					purged += r.Entries
				}
			})
			var units atomic.Int64
			err := pgtest.InParallel(workers, func(worker int) error {
				for n := range attempts {
					err := retry.run(ctx, isolations[(worker+n)%3], func(tx pgx.Tx) error {
						if _, err := l.Usage(ctx, tx, budget.Query{Scope: "a"}); err != nil {
							return err
						}
						time.Sleep(time.Duration(pgtest.Random(t).IntN(3)) * time.Millisecond) // with its snapshot open, while purges run
						_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.Lifetime(limit)}})
						return err
					})
					if err == nil {
						units.Add(1)
					} else if !errors.Is(err, budget.ErrExceeded) {
						return err
					}
				}
				return nil
			})
			close(stop)
			require.NoError(t, <-purging)
			require.NoError(t, err)
			require.Equal(t, int64(limit), units.Load())
			require.Equal(t, int64(limit), usage(t, pool, l, "a", 0).Used)
			require.Positive(t, purged)
			requireVerified(t, pool, l)
		})
	}
}

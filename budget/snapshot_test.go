package budget_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// A transaction with an old snapshot saw the scope with so many entries; since
// then 64 more were added, and all that can be purged was: also every entry that
// a charge on the old state would collide with, but for entry 1.
func TestCharge_OldSnapshotNeverGetsPastAPurge(t *testing.T) {
	t.Parallel()
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, clock := open(t)
			total := budget.Lifetime(50)
			for _, seen := range []int{0, 1, 2, 3, 15, 16, 17, 18, 33, 40} {
				scope := fmt.Sprintf("seen %d", seen)
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
			requireVerified(t, pool, l)
		})
	}
}

// At READ COMMITTED a statement's snapshot can be as old, if it waits for a row.
// Only without the lock: with it, the snapshot is taken after the wait.
func TestCharge_WaitingForAPurgedEntryIsASerializationFailure(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	withoutLocks(t, pool)
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
			_, err := first.Exec(ctx, `select metered.purge_scope($1, metered.scope_key($1), metered.clock(), 0, 5000, 1000, false)`, scope)
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
						time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
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

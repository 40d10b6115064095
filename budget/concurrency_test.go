package budget_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
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
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
	}
	return fmt.Errorf("gave up after %d attempts: %w", attempts, err)
}

func TestCharge_ConcurrentCallersNeverExceedTheLimit(t *testing.T) {
	t.Parallel()
	for _, locks := range []bool{true, false} {
		for _, level := range []string{"read committed", "repeatable read", "serializable", "mixed"} {
			t.Run(fmt.Sprintf("%s, locks %v", level, locks), func(t *testing.T) {
				t.Parallel()
				pool := pgtest.Open(t)
				if !locks {
					withoutLocks(t, pool)
				}
				isolation := func(n int) pgx.TxIsoLevel {
					if level == "mixed" {
						return isolations[n%len(isolations)]
					}
					return pgx.TxIsoLevel(level)
				}
				race(t, pool, isolation, !locks || level != "read committed")
			})
		}
	}
}

// race lets 8 workers make 24 charges each of a scope with room for 90 units, of
// 1 unit and of 1 to 7, the last of them of 1 unit again: then every unit is sold.
func race(t *testing.T, pool *pgxpool.Pool, isolation func(n int) pgx.TxIsoLevel, collide bool) {
	const workers, attempts, limit = 8, 24, 90
	ctx := t.Context()
	l := newLedger(t, budget.Config{})
	retry := &retrier{pool: pool}
	for _, scope := range []string{"units", "mixed"} {
		var admitted, units, denied atomic.Int64
		require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
			for n := range attempts {
				amount := int64(1)
				if scope == "mixed" && n < attempts/2 {
					amount = []int64{7, 5, 3, 2, 1}[(n+worker)%5]
				}
				c := budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.PerWindow(limit, time.Hour), budget.Lifetime(limit)}}
				err := retry.run(ctx, isolation(worker+n), func(tx pgx.Tx) error {
					// Something before it, so that the snapshot is older than the charge.
					if _, err := tx.Exec(ctx, "select 1"); err != nil {
						return err
					}
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
						return fmt.Errorf("denied %d with %d available", amount, exceeded.Refusals[0].Available)
					}
					denied.Add(1)
				default:
					return err
				}
			}
			return nil
		}), "only 40001 and 40P01 may come up, never 23505")

		require.Equal(t, int64(limit), units.Load())
		require.Equal(t, int64(workers*attempts), admitted.Load()+denied.Load())
		require.Equal(t, int64(limit), usage(t, pool, l, scope, 0).Used)
		require.Equal(t, int64(limit), usage(t, pool, l, scope, time.Hour).Used)
		var sum, count int64
		for e, err := range l.Entries(ctx, pool, scope, budget.EntriesOptions{}) {
			require.NoError(t, err)
			sum += e.Amount
			count++
		}
		require.Equal(t, int64(limit), sum)
		require.Equal(t, admitted.Load(), count)
	}
	requireVerified(t, pool, l)
	if collide {
		require.Positive(t, retry.retries.Load(), "the guard was never needed: this test proves nothing")
	} else {
		require.Zero(t, retry.retries.Load(), "at read committed writers queue and never fail")
	}
}

// Without the lock, whoever comes second sees the first one's entry only when it
// collides with it.
func TestCharge_CollisionIsASerializationFailure(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	withoutLocks(t, pool)
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
	const workers, attempts = 12, 15
	scopes := []string{"a", "b", "c", "d", "e"}
	require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
		for range attempts {
			var charges []budget.Charge
			for _, i := range rand.Perm(len(scopes)) {
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

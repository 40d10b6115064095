package budget_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func anyScope(string) bool { return true }

// rows are those of a scope in the ledger and of its refunds.
func rows(t *testing.T, pool *pgxpool.Pool, scope string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `select (select count(*) from metered.ledger where scope = $1)
		+ (select count(*) from metered.refund_sum where scope = $1)`, scope).Scan(&n))
	return n
}

func TestForget_LeavesNothingOfAScopeThatIsDone(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, charges := range []int{1, 2, 15, 16, 17, 18, 33, 100} {
		t.Run(fmt.Sprint(charges), func(t *testing.T) {
			t.Parallel()
			pool, l, clock := open(t)
			for n := range charges {
				posted := mustCharge(t, pool, l, "ip/1", 3)
				if n%5 == 0 {
					require.NoError(t, refund(ctx, pool, l, "ip/1", posted.Seq, 1))
				}
			}
			mustCharge(t, pool, l, "kept", 3)
			clock.Advance(time.Minute)
			mustCharge(t, pool, l, "ip/2", 3)
			opts := budget.PurgeOptions{OlderThan: time.Minute, Batch: 16, Forget: func(scope string) bool { return scope != "kept" }}
			report, err := l.Purge(ctx, pool, opts)
			require.NoError(t, err)
			refunds := (charges + 4) / 5
			require.Equal(t, budget.PurgeReport{Scopes: 3, Forgotten: 1, Entries: int64(charges + refunds)}, report)
			require.Equal(t, []int{0, 1, 1}, []int{rows(t, pool, "ip/1"), rows(t, pool, "ip/2"), rows(t, pool, "kept")})

			require.ErrorIs(t, refund(ctx, pool, l, "ip/1", 1, 1), budget.ErrUnknownEntry)
			require.Equal(t, budget.Usage{Query: budget.Query{Scope: "ip/1"}}, usage(t, pool, l, "ip/1", 0))
			require.Equal(t, int64(1), mustCharge(t, pool, l, "ip/1", 1, budget.Lifetime(1)).Seq)
			requireVerified(t, pool, l)
		})
	}
}

func TestForget_KeepsWhatStillCounts(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	mustCredit(t, pool, l, "prepaid", 5)
	mustCharge(t, pool, l, "held", 1)
	execute(t, pool, `update metered.ledger set held = 5, next_due = $1 where scope = 'held'`, start)
	mustCharge(t, pool, l, "young", 1)
	clock.Advance(time.Hour)
	mustCharge(t, pool, l, "young", 1)
	report, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Hour, Forget: anyScope})
	require.NoError(t, err)
	require.Equal(t, budget.PurgeReport{Scopes: 3}, report)
	report, err = l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Hour, Scope: "none", Forget: anyScope})
	require.NoError(t, err)
	require.Equal(t, budget.PurgeReport{Scopes: 1}, report)
}

// What a transaction saw of a scope before it was forgotten, and perhaps begun anew, is
// either what it is now or a serialization failure.
func TestForget_OldSnapshotNeverGetsPastIt(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	limit := budget.Limit{Max: 50, Window: time.Minute}
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for _, seen := range []int{0, 1, 2, 16, 17, 40} {
			for _, since := range []int{0, 1, 2, 17, 40, 50} {
				scope := fmt.Sprintf("%s, %d seen, %d since", iso, seen, since)
				chargeMany(t, pool, l, scope, seen)
				old := begin(t, pool, iso)
				require.Equal(t, int64(seen), usage(t, old, l, scope, 0).Seq) // takes the snapshot
				chargeMany(t, pool, l, scope, 3)
				clock.Advance(time.Hour)
				report, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Scope: scope, Forget: anyScope})
				require.NoError(t, err)
				require.Equal(t, 1, report.Forgotten)
				chargeMany(t, pool, l, scope, since)

				_, err = l.Charge(ctx, old, budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{limit}})
				if seen == 0 && since == 0 {
					require.NoError(t, err, scope) // empty then, and empty now
				} else {
					require.Equal(t, sqlstate.SerializationFailure, code(err), "%s: %v", scope, err)
				}
				require.NoError(t, old.Rollback(ctx))
			}
		}
	}
	requireVerified(t, pool, l)
}

// Many charge a scope that a purge forgets whenever it can, also without the lock. In
// no window more is let in than the limit, by the times of what committed.
func TestForget_NoWindowEverHoldsMore(t *testing.T) {
	t.Parallel()
	for _, locks := range []bool{true, false} {
		t.Run(fmt.Sprintf("locks %v", locks), func(t *testing.T) {
			t.Parallel()
			const workers, attempts = 6, 60
			limit := budget.Limit{Max: 5, Window: time.Minute}
			ctx := t.Context()
			pool, l, clock := open(t)
			if !locks {
				withoutLocks(t, pool)
			}
			retry := &retrier{pool: pool}
			purging, stop := context.WithCancel(ctx)
			defer stop()
			forgotten := 0
			done := pgtest.Going(func() error {
				for purging.Err() == nil {
					r, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: limit.Window, Batch: 16, Forget: anyScope})
					if c := code(err); err != nil && c != sqlstate.SerializationFailure && c != sqlstate.DeadlockDetected {
						return err
					}
					forgotten += r.Forgotten
				}
				return nil
			})
			var mu sync.Mutex
			var times []time.Time
			err := pgtest.InParallel(workers, func(worker int) error {
				for n := range attempts {
					var posted budget.Posted
					err := retry.run(ctx, isolations[(worker+n)%3], func(tx pgx.Tx) error {
						if _, err := l.Usage(ctx, tx, budget.Query{Scope: "a"}); err != nil {
							return err
						}
						if rand.IntN(10) == 0 {
							clock.Advance(2 * limit.Window)
						}
						time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
						r, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}})
						if err == nil {
							posted = r.Entries[0]
						}
						return err
					})
					if err == nil {
						mu.Lock()
						times = append(times, posted.At)
						mu.Unlock()
					} else if !errors.Is(err, budget.ErrExceeded) {
						return err
					}
				}
				return nil
			})
			stop()
			require.NoError(t, <-done)
			require.NoError(t, err)
			t.Logf("%d let in, forgotten %d times", len(times), forgotten)
			require.Positive(t, forgotten)
			for _, end := range times {
				n := int64(0)
				for _, at := range times {
					if at.After(end.Add(-limit.Window)) && !at.After(end) {
						n++
					}
				}
				require.LessOrEqual(t, n, limit.Max)
			}
			requireVerified(t, pool, l)
		})
	}
}

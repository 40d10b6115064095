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
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestPurge_KeepsWindowsExactAndIsIdempotent(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, batch := range pgtest.Size([]int{16, 5000}, []int{16, 17, 50, 5000}) {
		t.Run(fmt.Sprint(batch), func(t *testing.T) {
			t.Parallel()
			pool, l, clock := open(t)
			for n := range 120 {
				mustCharge(t, pool, l, "a", int64(n%5+1))
				if n%6 == 5 {
					require.NoError(t, refund(ctx, pool, l, "a", usage(t, pool, l, "a", 0).Seq-2, 1))
				}
				clock.Advance(time.Duration(n%3) * time.Second)
			}
			mustCharge(t, pool, l, "young", 1)
			const age = 40 * time.Second
			var queries []budget.Query
			for w := time.Duration(0); w <= age; w += time.Second / 2 {
				queries = append(queries, budget.Query{Scope: "a", Window: w})
			}
			before, err := l.Usage(ctx, pool, queries...)
			require.NoError(t, err)

			var progress []budget.PurgeReport
			opts := budget.PurgeOptions{OlderThan: age, Batch: batch, Progress: func(r budget.PurgeReport) { progress = append(progress, r) }}
			report, err := l.Purge(ctx, pool, opts)
			require.NoError(t, err)
			require.Equal(t, 2, report.Scopes)
			require.Positive(t, report.Entries)
			require.Equal(t, report, progress[len(progress)-1])
			require.GreaterOrEqual(t, len(progress), int(report.Entries)/batch)
			deleted := int64(0)
			for _, p := range progress {
				require.LessOrEqual(t, p.Entries-deleted, int64(batch))
				deleted = p.Entries
			}
			var left int64
			require.NoError(t, pool.QueryRow(ctx, `select count(*) from metered.ledger where scope = 'a'`).Scan(&left))
			require.Equal(t, int64(140)-report.Entries, left)

			after, err := l.Usage(ctx, pool, queries...)
			require.NoError(t, err)
			require.Equal(t, before, after)
			requireVerified(t, pool, l)
			again, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: age})
			require.NoError(t, err)
			require.Equal(t, budget.PurgeReport{Scopes: 2}, counts(again))
			require.Equal(t, "young", again.Last)
		})
	}
}

func TestPurge_PassesOverABusyScope(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 40)
	chargeMany(t, pool, l, "b", 40)
	clock.Advance(time.Hour)
	holder := occupy(t, pool, l, "a")
	impatient := newLedger(t, budget.Config{LockTimeout: 10 * time.Millisecond})
	report, err := impatient.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute})
	require.NoError(t, err)
	require.Equal(t, budget.PurgeReport{Scopes: 2, Entries: 31, Busy: 1}, counts(report))
	require.NoError(t, holder.Commit(ctx))
	report, err = l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Scope: "a"})
	require.NoError(t, err)
	require.Equal(t, budget.PurgeReport{Scopes: 1, Entries: 31}, counts(report))
}

func TestPurge_CancelledKeepsFinishedBatches(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 100)
	clock.Advance(time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	batches := 0
	report, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Batch: 16, Progress: func(budget.PurgeReport) {
		if batches++; batches == 2 {
			cancel()
		}
	}})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, budget.PurgeReport{Entries: 31}, counts(report))
	require.Equal(t, int64(100), usage(t, pool, l, "a", 0).Spent)
	require.Equal(t, int64(64), purge(t, pool, l, time.Minute).Entries)
	requireVerified(t, pool, l)
}

// Where the database's default is another isolation level, purges that meet do not fail.
func TestPurge_WorksAtEachDefaultIsolation(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 200)
	clock.Advance(time.Hour)
	execute(t, pool, fmt.Sprintf(`alter database %s set default_transaction_isolation = 'repeatable read'`,
		pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize()))
	pool.Reset()
	holder := occupy(t, pool, l, "a")
	var deleted atomic.Int64
	purging := pgtest.Going(func() error {
		return pgtest.InParallel(4, func(int) error {
			r, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Batch: 16})
			deleted.Add(r.Entries)
			return err
		})
	})
	pgtest.WaitQueued(t, pool, 4)
	require.NoError(t, holder.Commit(ctx))
	require.NoError(t, <-purging)
	require.Equal(t, int64(191), deleted.Load())
	requireVerified(t, pool, l)
}

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
	for _, charges := range pgtest.Size([]int{1, 16, 17, 100}, []int{1, 2, 15, 16, 17, 18, 33, 100}) {
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
			require.Equal(t, budget.PurgeReport{Scopes: 3, Forgotten: 1, Entries: int64(charges + refunds)}, counts(report))
			require.Equal(t, []int{0, 1, 1}, []int{rows(t, pool, "ip/1"), rows(t, pool, "ip/2"), rows(t, pool, "kept")})

			require.ErrorIs(t, refund(ctx, pool, l, "ip/1", 1, 1), budget.ErrUnknownEntry)
			require.Equal(t, budget.Usage{Query: budget.Query{Scope: "ip/1"}}, usage(t, pool, l, "ip/1", 0))
			require.Equal(t, int64(1), mustCharge(t, pool, l, "ip/1", 1, budget.Lifetime(1)).Seq)
			requireVerified(t, pool, l)
		})
	}
}

func TestForget_KeepsScopesThatStillCount(t *testing.T) {
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
	require.Equal(t, budget.PurgeReport{Scopes: 3}, counts(report))
	report, err = l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Hour, Scope: "none", Forget: anyScope})
	require.NoError(t, err)
	require.Equal(t, budget.PurgeReport{Scopes: 1}, counts(report))
}

// A transaction saw a scope before it was forgotten, and perhaps begun anew. Either it still sees the scope as it is
// now, or it gets a serialization failure.
func TestForget_OldSnapshotNeverGetsPastIt(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	limit := budget.Limit{Max: 50, Window: time.Minute}
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for _, seen := range pgtest.Size([]int{0, 1, 16, 40}, []int{0, 1, 2, 16, 17, 40}) {
			for _, since := range pgtest.Size([]int{0, 1, 17, 50}, []int{0, 1, 2, 17, 40, 50}) {
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

// A writer without the lock appends after the last entry of a scope while a purge forgets it. The purge gives up.
func TestForget_GivesUpBesideAWriterWithoutTheLock(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	withoutLocks(t, pool)
	theFullWay(t, pool) // the short way has the lock, or writes nothing
	chargeMany(t, pool, l, "a", 3)
	clock.Advance(time.Hour)
	tx := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	done := pgtest.Going(func() error {
		_, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Scope: "a", Forget: anyScope})
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, tx.Commit(ctx))
	require.Contains(t, []string{"", sqlstate.SerializationFailure}, code(<-done))
	require.Equal(t, 4, pgtest.Count(t, pool, "metered.ledger"))
	requireVerified(t, pool, l)
}

// Many charge a scope that a purge forgets whenever it can, also without the lock. No window has more units than the
// limit, by the times of the committed entries.
func TestForget_NoWindowEverHoldsMore(t *testing.T) {
	t.Parallel()
	for _, locks := range []bool{true, false} {
		t.Run(fmt.Sprintf("locks %v", locks), func(t *testing.T) {
			t.Parallel()
			const workers = 6
			attempts := pgtest.Size(15, 60)
			limit := budget.Limit{Max: 5, Window: time.Minute}
			ctx := t.Context()
			pool, _, clock := open(t)
			if !locks {
				withoutLocks(t, pool)
				theFullWay(t, pool)
			}
			// Without the lock, others may set the clock and charge after a charge has read the clock.
			l := newLedger(t, budget.Config{ClockTolerance: 24 * time.Hour})
			retry := &retrier{pool: pool}
			purging, stop := context.WithCancel(ctx)
			defer stop()
			var forgotten atomic.Int64
			done := pgtest.Going(func() error {
				for purging.Err() == nil {
					r, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: limit.Window, Batch: 16, Forget: anyScope})
					if c := code(err); err != nil && c != sqlstate.SerializationFailure && c != sqlstate.DeadlockDetected {
						return err
					}
					forgotten.Add(int64(r.Forgotten))
				}
				return nil
			})
			var mu sync.Mutex
			var times []time.Time
			err := pgtest.InParallel(workers, func(worker int) error {
				for n := 0; n < attempts || forgotten.Load() == 0 && n < 100*attempts; n++ {
					var posted budget.Posted
					err := retry.run(ctx, isolations[(worker+n)%3], func(tx pgx.Tx) error {
						if _, err := l.Usage(ctx, tx, budget.Query{Scope: "a"}); err != nil {
							return err
						}
						if pgtest.Random(t).IntN(10) == 0 {
							clock.Advance(2 * limit.Window)
						}
						time.Sleep(time.Duration(pgtest.Random(t).IntN(20)) * time.Millisecond) // with its snapshot open, while purges run
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
			t.Logf("%d let in, forgotten %d times", len(times), forgotten.Load())
			require.Positive(t, forgotten.Load())
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

// While one purge is between two batches, another forgets the scope, which then begins anew.
func TestPurge_OfAScopeThatBeganAnewBetweenTwoBatches(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	for range 100 {
		_, err := charge(t.Context(), pool, l, "a", 1)
		require.NoError(t, err)
	}
	clock.Advance(time.Hour)
	first := true
	_, err := l.Purge(t.Context(), pool, budget.PurgeOptions{OlderThan: time.Minute, Batch: 16, Progress: func(budget.PurgeReport) {
		if !first {
			return
		}
		first = false
		r, err := l.Purge(t.Context(), pool, budget.PurgeOptions{OlderThan: time.Minute, Forget: func(string) bool { return true }})
		require.NoError(t, err)
		require.Equal(t, 1, r.Forgotten)
		for range 2 {
			_, err := charge(t.Context(), pool, l, "a", 1)
			require.NoError(t, err)
		}
	}})
	require.NoError(t, err)
	report, err := l.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

// counts is a report without its time.
func counts(r budget.PurgeReport) budget.PurgeReport {
	r.KeptSince, r.Last = time.Time{}, ""
	return r
}

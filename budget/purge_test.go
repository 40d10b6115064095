package budget_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestPurge_KeepsWindowsExactAndIsIdempotent(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, batch := range []int{16, 17, 50, 5000} {
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
			require.Equal(t, budget.PurgeReport{Scopes: 2}, again)
		})
	}
}

func TestPurge_ManyAtOnceWhileChargesGoOn(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	scopes := []string{"a", "b", "c"}
	for _, scope := range scopes {
		chargeMany(t, pool, l, scope, 200)
	}
	clock.Advance(time.Hour)
	var purged atomic.Int64
	require.NoError(t, pgtest.InParallel(6, func(worker int) error {
		if worker < 3 {
			for range 4 {
				r, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Batch: 16})
				if err != nil {
					return err
				}
				purged.Add(r.Entries)
			}
			return nil
		}
		for range 40 {
			if _, err := charge(ctx, pool, l, scopes[rand.IntN(3)], 1, budget.Limit{Max: 1000, Window: time.Minute}); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, int64(3*(192-1)), purged.Load())
	var spent, recent int64
	for _, scope := range scopes {
		spent += usage(t, pool, l, scope, 0).Spent
		recent += usage(t, pool, l, scope, time.Minute).Used
	}
	require.Equal(t, []int64{720, 120}, []int64{spent, recent})
	requireVerified(t, pool, l)
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
	require.Equal(t, budget.PurgeReport{Scopes: 2, Entries: 31, Busy: 1}, report)
	require.NoError(t, holder.Commit(ctx))
	report, err = l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Scope: "a"})
	require.NoError(t, err)
	require.Equal(t, budget.PurgeReport{Scopes: 1, Entries: 31}, report)
}

func TestPurge_CancelledKeepsWhatItDeletedDeleted(t *testing.T) {
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
	require.Equal(t, budget.PurgeReport{Entries: 31}, report)
	require.Equal(t, int64(100), usage(t, pool, l, "a", 0).Spent)
	require.Equal(t, int64(64), purge(t, pool, l, time.Minute).Entries)
	requireVerified(t, pool, l)
}

// Where the database's default is another isolation level, purges that meet do not fail.
func TestPurge_WorksWhateverTheDefaultIsolation(t *testing.T) {
	t.Parallel()
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

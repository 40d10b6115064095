package budget_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgmetered/metered/internal/pgtest"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// As TestPlans_AreRightFromTheFirstChargeOn, for batches: the plans of a connection's first calls, made while there is
// nothing, are right for long chains and many records.
func TestPlans_OfBatchesAreRightFromTheFirstOn(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, analysed := range []bool{false, true} {
		t.Run(fmt.Sprint("analysed ", analysed), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, _ := open(t)
			tables := []string{"ledger", "refund_sum", "operations", "operations_horizon", "hold_lines"}
			for _, table := range tables {
				execute(t, pool, "alter table metered."+table+" set (autovacuum_enabled = off)")
				if analysed {
					execute(t, pool, "analyze metered."+table)
				}
			}
			conn, err := pool.Acquire(ctx)
			require.NoError(t, err)
			defer conn.Release()
			n := 0
			batches := func(times int) {
				for range times {
					charges, events := make([]budget.Charge, 8), make([]budget.UsageEvent, 8)
					for i := range charges {
						charges[i] = take(fmt.Sprint("s", i%6), 1, budget.PerWindow(1<<40, time.Hour), budget.PerWindow(1<<40, time.Microsecond), budget.Lifetime(1<<40))
						events[i] = budget.UsageEvent{ID: fmt.Sprint("e", n-n%2), Charge: charges[i]} // every other one again
						n++
					}
					charges[7].Limits = []budget.Limit{budget.PerWindow(0, time.Hour)} // its scope is judged exactly
					tx, err := conn.Begin(ctx)
					require.NoError(t, err)
					_, err = l.ChargeEach(ctx, tx, charges...)
					require.NoError(t, err)
					_, err = l.Ingest(ctx, tx, events...)
					require.NoError(t, err)
					require.NoError(t, tx.Commit(ctx))
				}
			}
			scans := func() (n int64) {
				for _, table := range tables {
					n += tableStat(t, conn, table, "seq_scan")
				}
				return n
			}
			reads := func() (n int64) {
				tableStat(t, conn, "ledger", "seq_scan") // flushes
				require.NoError(t, conn.QueryRow(ctx, `select sum(idx_tup_read)::bigint from pg_stat_user_indexes
					where schemaname = 'metered' and relname in ('ledger', 'refund_sum', 'operations')`).Scan(&n))
				return n
			}
			before := scans()
			batches(10) // past the five plans that are made for their values
			start := reads()
			batches(10)
			few := reads() - start
			batches(pgtest.Size(80, 300)) // then a scope's chain is three times as long
			start = reads()
			batches(10)
			many := reads() - start
			require.Equal(t, before, scans())
			t.Logf("index entries read by 10 batches: %d and %d", few, many)
			require.LessOrEqual(t, many, few+few/2)
		})
	}
}

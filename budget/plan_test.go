package budget_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// PL/pgSQL keeps the plans of a connection's first calls. Made while there are no entries, or few, with or without
// statistics, they must still be right for many: no sequential scan, and no more index entries read on a longer chain.
func TestPlans_AreRightFromTheFirstChargeOn(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	for i := range pgtest.Size(4, 8) {
		few, analysed := []int{0, 3000, 30, 300}[i/2], i%2 == 1
		t.Run(fmt.Sprintf("%d entries, analysed %v", few, analysed), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, _ := open(t)
			execute(t, pool, `alter table metered.ledger set (autovacuum_enabled = off)`)
			execute(t, pool, `alter table metered.refund_sum set (autovacuum_enabled = off)`)
			_, err := pool.Exec(ctx, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
				select g, 1, now(), g, 0, 0, 0, 0, 'c', 'scope ' || s from generate_series(1, 10) s, generate_series(1, $1 / 10) g`, few)
			require.NoError(t, err)
			if analysed {
				execute(t, pool, `analyze metered.ledger`)
				execute(t, pool, `analyze metered.refund_sum`)
			}
			conn, err := pool.Acquire(ctx)
			require.NoError(t, err)
			defer conn.Release()
			limits := []budget.Limit{budget.PerWindow(20_000, time.Hour), budget.PerWindow(20_000, time.Microsecond), budget.Lifetime(20_000)}
			refused := []budget.Limit{{Max: 1, Window: time.Hour}}
			tx := autocommit{Querier: conn}
			charges := func(n int) {
				for range n {
					_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Limits: limits})
					require.NoError(t, err)
				}
			}
			others := func(seq int64) {
				_, err := l.Check(ctx, conn, budget.Charge{Scope: "a", Amount: 1, Limits: refused})
				require.ErrorIs(t, err, budget.ErrExceeded)
				_, err = l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: seq, Amount: 1})
				require.NoError(t, err)
				_, err = l.Credit(ctx, tx, budget.Credit{Scope: "a", Amount: 1})
				require.NoError(t, err)
				_, err = l.Usage(ctx, conn, budget.Query{Scope: "a", Window: time.Hour})
				require.NoError(t, err)
			}
			scans := tableStat(t, conn, "ledger", "seq_scan") + tableStat(t, conn, "refund_sum", "seq_scan")
			measure := func(f func()) int64 {
				before := indexReads(t, conn)
				f()
				return indexReads(t, conn) - before
			}
			for seq := range int64(10) { // past the five plans that are made for their values
				charges(10)
				others(seq*12 + 1)
			}
			fewCharges, fewOthers := measure(func() { charges(50) }), measure(func() { others(111) })
			charges(pgtest.Size(300, 4800)) // a scan of them reads more than twice as much
			manyCharges, manyOthers := measure(func() { charges(50) }), measure(func() { others(112) })

			require.Equal(t, scans, tableStat(t, conn, "ledger", "seq_scan")+tableStat(t, conn, "refund_sum", "seq_scan"))
			t.Logf("index entries read: by 50 charges %d and %d, by one of each other call %d and %d",
				fewCharges, manyCharges, fewOthers, manyOthers)
			require.LessOrEqual(t, manyCharges, fewCharges+fewCharges/2)
			require.LessOrEqual(t, manyOthers, 3*fewOthers)
		})
	}
}

// indexReads is how many entries of the ledger's indexes were read so far.
func indexReads(t *testing.T, conn *pgxpool.Conn) (n int64) {
	t.Helper()
	tableStat(t, conn, "ledger", "seq_scan") // flushes
	err := conn.QueryRow(t.Context(), `select sum(idx_tup_read)::bigint from pg_stat_user_indexes
		where schemaname = 'metered' and relname in ('ledger', 'refund_sum')`).Scan(&n)
	require.NoError(t, err)
	return n
}

// Calls that look at every scope read a few entries of each, and no table from end to end, with statistics and without.
func TestPlans_OfEveryScopeAFewEntriesAreRead(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	for _, analysed := range []bool{false, true} {
		t.Run(fmt.Sprintf("analysed %v", analysed), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			owner, l, _ := open(t)
			const each = 100
			scopes := pgtest.Size(250, 1200)
			execute(t, owner, `alter table metered.ledger set (autovacuum_enabled = off)`)
			_, err := owner.Exec(ctx, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
				select g, 1, $1::timestamptz + g * interval '1 second', g, 0, 0, 0, 0, 'c', 'scope ' || s
				from generate_series(1, $2) s, generate_series(1, $3) g`, start.Add(-time.Hour), scopes, each)
			require.NoError(t, err)
			if analysed {
				execute(t, owner, `analyze metered.ledger`)
			}
			pool := pgtest.Reopen(t, owner, func(cfg *pgxpool.Config) { cfg.MaxConns = 1 })
			stats := func() (scans, reads int64) {
				conn, err := pool.Acquire(ctx)
				require.NoError(t, err)
				defer conn.Release()
				return tableStat(t, conn, "ledger", "seq_scan"), indexReads(t, conn)
			}
			for what, call := range map[string]func(){
				"ClockAhead": func() {
					for _, err := range l.ClockAhead(ctx, pool, 0) {
						require.NoError(t, err)
					}
				},
				"DryRun": func() {
					r, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Hour - 50*time.Second, DryRun: true})
					require.NoError(t, err)
					require.Equal(t, int64(scopes*47), r.Entries, "of 50 entries the first stays, and the block of the last")
				},
			} {
				scans, reads := stats()
				call()
				scansAfter, readsAfter := stats()
				require.Equal(t, scans, scansAfter, what)
				require.Less(t, readsAfter-reads, int64(scopes*20), what)
			}
		})
	}
}

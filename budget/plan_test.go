package budget_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// PL/pgSQL keeps the plans of a connection's first calls. Made while the table is
// empty, whatever its statistics say, they must still be right for many entries:
// no sequential scan, and no more index entries read the longer the chain is.
func TestPlans_AreRightFromTheFirstChargeOn(t *testing.T) {
	t.Parallel()
	for _, analysed := range []bool{false, true} {
		t.Run(fmt.Sprintf("analysed %v", analysed), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, _ := open(t)
			execute(t, pool, `alter table metered.ledger set (autovacuum_enabled = off)`)
			execute(t, pool, `alter table metered.refund_sum set (autovacuum_enabled = off)`)
			if analysed {
				execute(t, pool, `analyze metered.ledger`)
				execute(t, pool, `analyze metered.refund_sum`)
			}
			conn, err := pool.Acquire(ctx)
			require.NoError(t, err)
			defer conn.Release()
			limits := []budget.Limit{{Max: 20_000, Window: time.Hour}, {Max: 20_000, Window: time.Microsecond}, {Max: 20_000}}
			denied := []budget.Limit{{Max: 1, Window: time.Hour}}
			tx := autocommit{Querier: conn}
			chargeN := func(n int) {
				call, err := l.Prepare(budget.Charge{Scope: "a", Amount: 1, Limits: limits})
				require.NoError(t, err)
				for range n {
					_, err := call.Scan(conn.QueryRow(ctx, call.SQL(), call.Args()...))
					require.NoError(t, err)
				}
			}
			everything := func(seq int64) {
				_, err := l.Check(ctx, conn, budget.Charge{Scope: "a", Amount: 1, Limits: denied})
				require.ErrorIs(t, err, budget.ErrExceeded)
				_, err = l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: seq, Amount: 1})
				require.NoError(t, err)
				_, err = l.Credit(ctx, tx, budget.Credit{Scope: "a", Amount: 1})
				require.NoError(t, err)
				_, err = l.Usage(ctx, conn, budget.Query{Scope: "a", Window: time.Hour})
				require.NoError(t, err)
			}
			scans := tableStat(t, conn, "ledger", "seq_scan") + tableStat(t, conn, "refund_sum", "seq_scan")

			var firsts, lasts [2]int64
			measure := func(into *[2]int64, seq int64) {
				before := indexReads(t, conn)
				chargeN(50)
				charged := indexReads(t, conn)
				everything(seq)
				into[0], into[1] = charged-before, indexReads(t, conn)-charged
			}
			chargeN(1)
			for range 10 { // past the five plans that are made with the values
				everything(1)
				chargeN(1)
				if _, err := l.Credit(ctx, tx, budget.Credit{Scope: "b", Amount: 1}); err != nil {
					require.NoError(t, err)
				}
				break
			}
			chargeN(150)
			measure(&firsts, 60)
			chargeN(4700)
			measure(&lasts, 61)

			require.Equal(t, scans, tableStat(t, conn, "ledger", "seq_scan")+tableStat(t, conn, "refund_sum", "seq_scan"))
			require.LessOrEqual(t, lasts[0], firsts[0]+firsts[0]/2, "index entries read by 50 charges of a chain of 200, and of 5,000")
			require.LessOrEqual(t, lasts[1], firsts[1]*3, "and by one of each other call")
		})
	}
}

package budget_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Poolers ask for other modes than pgx's own.
func TestLedger_WorksInEveryQueryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool := pgtest.OpenWith(t, pgtest.Options{Config: func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode
			}})
			l := newLedger(t, budget.Config{})
			limits := []budget.Limit{budget.PerWindow(10, 36*time.Hour).Named(`o'clock`), budget.Lifetime(12)}
			note := budget.Note{Actor: `it's "\ann"`}
			require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				r, err := l.Charge(ctx, tx, budget.Charge{Scope: `a'"\{,}`, Amount: 9, Limits: limits, Note: note}, budget.Charge{Scope: "b", Amount: 1})
				require.NoError(t, err)
				require.Equal(t, int64(1), r.Entries[0].Standings[0].Available)
				_, err = l.Charge(ctx, tx, budget.Charge{Scope: `a'"\{,}`, Amount: 2, Limits: limits})
				var exceeded *budget.ExceededError
				require.ErrorAs(t, err, &exceeded)
				require.Len(t, exceeded.Refusals, 1)
				require.LessOrEqual(t, exceeded.RetryAfter(), 36*time.Hour)
				_, err = l.Refund(ctx, tx, budget.Refund{Scope: `a'"\{,}`, Seq: 1, Amount: 2, Note: note})
				require.NoError(t, err)
				_, err = l.Credit(ctx, tx, budget.Credit{Scope: `a'"\{,}`, Amount: 3})
				require.NoError(t, err)
				_, err = l.RepairClock(ctx, tx, "b", note)
				require.NoError(t, err)
				_, err = l.Check(ctx, tx, budget.Charge{Scope: `a'"\{,}`, Amount: 3, Limits: limits})
				require.NoError(t, err)
				_, err = l.Check(ctx, tx, budget.Charge{Scope: "new", Amount: 1, Limits: []budget.Limit{budget.Prepaid()}})
				require.ErrorIs(t, err, budget.ErrExceeded)
				_, err = l.Charge(ctx, tx, budget.Charge{Scope: "new", Amount: 1, Limits: []budget.Limit{budget.Prepaid()}})
				require.ErrorIs(t, err, budget.ErrExceeded)
				return nil
			}))
			u, err := l.Usage(ctx, pool, budget.Query{Scope: `a'"\{,}`}, budget.Query{Scope: `a'"\{,}`, Window: time.Hour})
			require.NoError(t, err)
			require.Equal(t, []int64{4, 7}, []int64{u[0].Used, u[1].Used})
			var seen []budget.Kind
			for e, err := range l.Entries(ctx, pool, `a'"\{,}`, budget.EntriesOptions{}) {
				require.NoError(t, err)
				require.Equal(t, e.Kind != budget.KindCredit, e.Note == note)
				seen = append(seen, e.Kind)
			}
			require.Equal(t, []budget.Kind{budget.KindCharge, budget.KindRefund, budget.KindCredit}, seen)
			_, err = l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Microsecond})
			require.NoError(t, err)
			requireVerified(t, pool, l)
		})
	}
}

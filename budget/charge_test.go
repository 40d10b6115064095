package budget_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestCharge_DenialNamesEveryLimitAndLeavesTheTransactionUsable(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	l, err := budget.New(budget.Config{})
	require.NoError(t, err)

	hourly := budget.Limit{Max: 100, Window: time.Hour, Name: "hourly"}
	total := budget.Limit{Max: 150, Name: "total"}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 60, Limits: []budget.Limit{hourly, total}})
		require.NoError(t, err)
		require.Equal(t, int64(1), r.Entries[0].Seq)
		require.Equal(t, int64(40), r.Entries[0].Standings[0].Available)
		clock.Advance(time.Minute)

		_, err = l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 95, Limits: []budget.Limit{hourly, total}})
		var exceeded *budget.ExceededError
		require.ErrorAs(t, err, &exceeded)
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.Equal(t, []budget.Refusal{
			{Scope: "a", Limit: hourly, Used: 60, Requested: 95, Available: 40, RetryAfter: 59 * time.Minute},
			{Scope: "a", Limit: total, Used: 60, Requested: 95, Available: 90, RetryAfter: budget.Never},
		}, exceeded.Refusals)
		require.Equal(t, budget.Never, exceeded.RetryAfter())

		_, err = l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 40, Limits: []budget.Limit{hourly, total}})
		return err
	}))
	usage, err := l.Usage(ctx, pool, budget.Query{Scope: "a", Window: time.Hour}, budget.Query{Scope: "a"})
	require.NoError(t, err)
	require.Equal(t, int64(100), usage[0].Used)
	require.Equal(t, int64(2), usage[1].Seq)
	report, err := l.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.True(t, report.OK(), report.Differences)
	require.Equal(t, int64(2), report.Entries)
}

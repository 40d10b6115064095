package budget_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// Totals near the end of 64 bits cannot be reached by charging: the owner writes them.
func TestOverflow_IsATypedErrorAndWritesNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	const insert = `insert into metered.ledger (scope, seq, kind, amount, at, spent, refunded, credited, held, epoch)
		values ($1, 1, 'c', 1, $2, $3, $4, $5, 0, 0)`
	execute(t, pool, insert, "spent", start, int64(math.MaxInt64-5), 0, 0)
	execute(t, pool, insert, "credited", start, 0, 0, int64(math.MaxInt64-5))
	execute(t, pool, insert, "refunded", start, 0, int64(math.MaxInt64), 0)

	_, err := charge(ctx, pool, l, "spent", 6)
	require.ErrorIs(t, err, budget.ErrOverflow)
	mustCharge(t, pool, l, "spent", 5)
	require.Equal(t, int64(math.MaxInt64), usage(t, pool, l, "spent", 0).Spent)

	_, err = l.Credit(ctx, autocommit{Querier: pool}, budget.Credit{Scope: "credited", Amount: 6})
	require.ErrorIs(t, err, budget.ErrOverflow)
	_, err = l.Credit(ctx, autocommit{Querier: pool}, budget.Credit{Scope: "credited", Amount: 5})
	require.NoError(t, err)
	require.ErrorIs(t, refund(ctx, pool, l, "refunded", 1, 1), budget.ErrOverflow)
	require.Equal(t, int64(1), usage(t, pool, l, "refunded", 0).Seq)
}

func TestBounds_LargestArgumentsWork(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	limits := []budget.Limit{budget.Lifetime(budget.MaxLimit), budget.PerWindow(budget.MaxLimit, budget.MaxWindow)}
	mustCharge(t, pool, l, "a", budget.MaxAmount, limits...)
	posted := mustCharge(t, pool, l, "a", budget.MaxAmount, limits...)
	for _, s := range posted.Standings {
		require.Equal(t, int64(2*budget.MaxAmount), s.Used)
		require.Equal(t, int64(budget.MaxLimit-2*budget.MaxAmount), s.Available)
	}

	// So much credit that what is available would not fit into 64 bits.
	execute(t, pool, `insert into metered.ledger (scope, seq, kind, amount, at, spent, refunded, credited, held, epoch)
		values ('rich', 1, 'd', 1, $1, 0, 0, $2, 7, 0)`, start, int64(math.MaxInt64))
	posted = mustCharge(t, pool, l, "rich", 1, limits[0])
	require.Equal(t, budget.Standing{Limit: limits[0], Used: 1 - math.MaxInt64, Held: 7, Available: math.MaxInt64 - 7}, posted.Standings[0])

	// So much spent and held that the sum of both would not fit.
	execute(t, pool, `insert into metered.ledger (scope, seq, kind, amount, at, spent, refunded, credited, held, epoch, next_due)
		values ('full', 1, 'c', 1, $1, $2, 0, 0, 100, 0, $1::timestamptz + interval '1 hour')`, start, int64(math.MaxInt64-50))
	execute(t, pool, `insert into metered.hold_lines (hold, key, amount, open, due, scope) values (1, 0, 100, 100, $1, 'full')`, start.Add(time.Hour))
	var full *budget.ExceededError
	for _, limit := range append(limits, budget.Prepaid(), budget.PerWindow(0, time.Hour)) {
		_, err := charge(ctx, pool, l, "full", budget.MaxAmount, limit)
		require.ErrorAs(t, err, &full)
		require.Zero(t, full.Refusals[0].Available)
	}

	var charges []budget.Charge
	for i := range budget.MaxScopes {
		c := budget.Charge{Scope: fmt.Sprintf("scope %d", i), Amount: 1}
		for j := range budget.MaxLimits {
			c.Limits = append(c.Limits, budget.PerWindow(1, time.Duration(j+1)*time.Hour))
		}
		charges = append(charges, c)
	}
	r, err := l.Charge(ctx, autocommit{Querier: pool}, charges...)
	require.NoError(t, err)
	require.Len(t, r.Entries, budget.MaxScopes)
	_, err = l.Charge(ctx, autocommit{Querier: pool}, charges...)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, budget.MaxScopes*budget.MaxLimits)
	require.Equal(t, charges[63].Limits[15], exceeded.Refusals[1023].Limit)
	require.Equal(t, charges[63].Scope, exceeded.Refusals[1023].Scope)
}

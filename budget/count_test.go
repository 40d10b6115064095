package budget_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// charges is how many charges of a scope count in a window, or over its lifetime.
func charges(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, scope string, window time.Duration) int64 {
	t.Helper()
	return usage(t, pool, l, scope, window).Charges
}

// An entry that is no charge, between charges and after them, counts in no window.
func TestUsage_CountsChargesAndNothingElse(t *testing.T) {
	t.Parallel()
	for _, full := range []bool{false, true} {
		t.Run(fmt.Sprint(full), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, clock := open(t)
			if full {
				theFullWay(t, pool)
			}
			require.Zero(t, charges(t, pool, l, "user", 0))
			mustCredit(t, pool, l, "user", 100)
			require.Zero(t, charges(t, pool, l, "user", time.Hour))
			for range 20 {
				clock.Advance(time.Minute)
				mustCharge(t, pool, l, "user", 3, budget.Lifetime(1000), budget.PerWindow(900, time.Hour))
			}
			mustCredit(t, pool, l, "user", 100)
			require.NoError(t, refund(ctx, pool, l, "user", 2, 3)) // a charge that is refunded was made
			clock.Advance(30*time.Second + time.Minute)
			mustCharge(t, pool, l, "user", 5, budget.PerWindow(900, time.Hour))
			_, err := charge(ctx, pool, l, "user", 5000, budget.PerWindow(900, time.Hour))
			require.ErrorIs(t, err, budget.ErrExceeded)
			require.Equal(t, int64(21), charges(t, pool, l, "user", 0))
			require.Equal(t, int64(21), charges(t, pool, l, "user", time.Hour))
			require.Equal(t, int64(11), charges(t, pool, l, "user", 11*time.Minute))
			require.Equal(t, int64(1), charges(t, pool, l, "user", 80*time.Second))
			clock.Advance(time.Hour)
			require.Zero(t, charges(t, pool, l, "user", time.Minute))

			// Batches: three of a scope at once.
			batch := make([]budget.Charge, 4)
			for i := range batch {
				batch[i] = budget.Charge{Scope: []string{"user", "other"}[i/3], Amount: 1}
			}
			require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := l.ChargeEach(ctx, tx, batch...)
				return err
			}))
			require.Equal(t, int64(3), charges(t, pool, l, "user", time.Minute))
			require.Equal(t, int64(24), charges(t, pool, l, "user", 0))
			require.Equal(t, int64(1), charges(t, pool, l, "other", 0))

			series, err := l.Series(ctx, pool, "user", start, clock.Now().Add(time.Minute), budget.Hour, nil)
			require.NoError(t, err)
			var perHour []int64
			for _, r := range series {
				perHour = append(perHour, r.Charges)
			}
			require.Equal(t, []int64{21, 3}, perHour)
			requireVerified(t, pool, l)

			// A purge takes nothing from a lifetime.
			purge(t, pool, l, time.Minute)
			require.Equal(t, int64(24), charges(t, pool, l, "user", 0))
			require.Equal(t, int64(3), charges(t, pool, l, "user", time.Minute))
			requireVerified(t, pool, l)
		})
	}
}

// Tallies count before and after they are folded.
func TestUsage_CountsTalliesAtOnce(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	clock.Advance(time.Hour)
	for range 3 {
		clock.Advance(time.Minute + time.Microsecond) // one in 32 is folded at once
		mustCharge(t, pool, l, "channel", 7)
	}
	require.Equal(t, 3, pgtest.Count(t, pool, "metered.tallies"))
	look := func() {
		t.Helper()
		require.Equal(t, int64(5), charges(t, pool, l, "channel", 0))
		require.Equal(t, int64(2), charges(t, pool, l, "channel", 2*time.Minute))
		r, err := l.UsageBetween(t.Context(), pool, "channel", start, clock.Now())
		require.NoError(t, err)
		require.Equal(t, int64(4), r.Charges)
	}
	look()
	mustCredit(t, pool, l, "channel", 1)
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))
	look()
	requireVerified(t, pool, l)
}

// Verify finds an entry that is counted as another number of charges than its kind says.
func TestVerify_FindsAWrongCountOfCharges(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	for range 3 {
		mustCharge(t, pool, l, "user", 1)
	}
	mustCredit(t, pool, l, "user", 1)
	requireVerified(t, pool, l)
	execute(t, pool, `update metered.ledger set others = 1 where scope = 'user' and seq = 2`)
	report, err := l.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Equal(t, []budget.Difference{
		{Scope: "user", Seq: 2, Field: "charges", Got: "0", Want: "1"},
		{Scope: "user", Seq: 3, Field: "charges", Got: "2", Want: "1"},
	}, report.Differences)
}

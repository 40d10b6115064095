package budget_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

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

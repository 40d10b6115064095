package leases_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// Each charge from a lease counts as one, before and after the lease is settled.
func TestCharge_FromALeaseIsCounted(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	rule := patient
	rule.MinSlice = 100 // more than is spent
	p := f.pool(rule)
	limit := budget.Lifetime(100_000)
	made := f.warm(p, charge(1, limit))
	for range 3 {
		_, err := f.spend(p, pgx.ReadCommitted, charge(7, limit))
		require.NoError(t, err)
		made++
	}
	require.Positive(t, f.usage("hot").Leased)
	look := func() {
		t.Helper()
		r, err := f.ledger.UsageBetween(t.Context(), f.db, "hot", time.Time{}, time.Now().Add(time.Hour))
		require.NoError(t, err)
		require.Equal(t, made, r.Charges)
		u, err := f.ledger.Usage(t.Context(), f.db, budget.Query{Scope: "hot"}, budget.Query{Scope: "hot", Window: time.Hour})
		require.NoError(t, err)
		require.Equal(t, made, u[0].Charges)
		require.Equal(t, made, u[1].Charges)
	}
	look()
	require.Positive(t, f.settled("hot", p))
	look()
}

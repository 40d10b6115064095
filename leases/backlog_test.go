package leases_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// A pool writes what is due in a scope in steps, as calls do that have a transaction of their own.
func TestAllow_GoesThroughABacklogOfMinima(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))
	book, err := holds.New(f.ledger, holds.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
		for n := range 60 {
			_, err := book.Place(t.Context(), tx, holds.Placement{ID: fmt.Sprint(n), TTL: time.Minute, Lines: []holds.Line{{Scope: "hot", Amount: 2, AtLeast: 1}}})
			require.NoError(t, err)
		}
		return nil
	}))
	clock.Advance(time.Hour)
	p := f.pool(leases.Rule{})
	require.NoError(t, p.Allow(t.Context(), charge(1, budget.Lifetime(61))))
	require.EqualValues(t, 61, f.usage("hot").Used)
	require.EqualValues(t, 61, f.settled("hot", p))
}

package leases_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// A lease ends with the period in which it was opened. While it is open, its spends count in that period. In the next
// period they are held until it is settled, so they count again there: neither period lets too many in.
func TestPeriods_ALeaseOverTheEndNeverLetsTooManyIn(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	midnight := time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC)
	clock := pgtest.SetClock(t, f.db, midnight.Add(-10*time.Minute))
	limit := budget.Per(1000, budget.Day, time.UTC, time.Time{})
	p := f.pool(leases.Rule{Prefix: "hot", TTL: time.Hour, MinSlice: 100, MaxSlice: 100, Share: 1, Idle: time.Hour})
	spent := f.warm(p, charge(1, limit))

	var ends time.Time
	require.NoError(t, f.db.QueryRow(t.Context(), "select max(ends_at) from metered.leases").Scan(&ends))
	require.True(t, ends.Equal(midnight), "%v", ends)
	used := func() budget.Usage {
		u, err := f.ledger.Usage(t.Context(), f.db, budget.Query{Scope: "hot", Period: limit.Period})
		require.NoError(t, err)
		return u[0]
	}
	before := used()
	require.Equal(t, spent, before.Used)
	require.Positive(t, before.Leased)
	fill := func() (made int64) {
		for amount := int64(256); amount > 0; amount /= 2 {
			for {
				err := pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
					_, err := f.ledger.Charge(t.Context(), tx, charge(amount, limit))
					return err
				})
				if errors.Is(err, budget.ErrExceeded) {
					break
				}
				require.NoError(t, err)
				made += amount
			}
		}
		return made
	}
	require.Equal(t, 1000-spent-before.Leased, fill(), "the whole lease counts in the period in which it was opened")

	clock.Set(midnight)
	after := used()
	require.Equal(t, midnight, after.PeriodStart)
	r, err := f.spend(p, pgx.ReadCommitted, charge(1, limit))
	require.NoError(t, err)
	first := r.Entries[0]
	if first.Lease != 0 {
		var opened time.Time
		require.NoError(t, f.db.QueryRow(t.Context(), "select opened_at from metered.leases where no = $1", first.Lease).Scan(&opened))
		require.False(t, opened.Before(midnight), "a lease of the day before is spent from")
	}
	var made int64
	var u budget.Usage
	for range 3 { // the lease of the day before may be settled between the two, and so may one of this day
		made += fill()
		if u = used(); u.Used+u.Held+u.Leased == 1000 {
			break
		}
	}
	require.Equal(t, int64(1000), u.Used+u.Held+u.Leased)
	require.LessOrEqual(t, made+1, int64(1000))

	f.settled("hot", p)
	u = used()
	require.LessOrEqual(t, u.Used, int64(1000))
	fill()
	require.Equal(t, int64(1000), used().Used)
}

package leases_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// openLeasesSQL opens so many leases of 10 units, of hot, that end one after the other, and returns their numbers.
const openLeasesSQL = `select array_agg((metered.open_lease(row('hot', null, 10, 0, '{}', null, false, null, null)::metered.new_charge,
	row('rows', 'owner', 10, 1, interval '1 hour' + n * interval '1 second', null)::metered.lease_terms, '1 min', 1000)).no)
from generate_series(1, $1::int) n`

const settleLeasesSQL = `select count(*) from unnest($1::bigint[]) no, lateral metered.settle_lease(no, 'owner', null, 1000, null, '1 min') s
where s.status = 'settled'`

// A refusal names the units of all open leases, and when the last one ends, without reading them. The short form finds
// a refusal that sums them up.
func TestRefusal_ReadsAsMuchWithManyOpenLeasesAsWithFew(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, time.Date(2026, 1, 5, 12, 0, 0, 0, time.UTC))
	conn, err := f.db.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `alter table metered.leases set (autovacuum_enabled = off)`)
	require.NoError(t, err)
	openLeases := func(n int) (nos []int64) {
		require.NoError(t, conn.QueryRow(t.Context(), openLeasesSQL, n).Scan(&nos))
		return nos
	}
	settle := func(nos []int64) {
		var settled int
		require.NoError(t, conn.QueryRow(t.Context(), settleLeasesSQL, nos).Scan(&settled))
		require.Len(t, nos, settled)
	}
	verified := func() {
		report, err := f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{})
		require.NoError(t, err)
		require.Empty(t, report.Differences)
	}
	refuse := func(leased int64, last time.Duration) {
		for _, limit := range []budget.Limit{budget.Lifetime(leased), budget.PerWindow(leased, time.Hour)} {
			err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
				_, err := f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "hot", Amount: 1, Limits: []budget.Limit{limit}})
				return err
			})
			var refused *budget.ExceededError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, leased, refused.Refusals[0].Leased)
			require.Zero(t, refused.Refusals[0].Held)
			require.Equal(t, last, refused.Refusals[0].RetryAfter)
		}
	}
	rows := func(fn func()) (n int64) {
		read := func() (n int64) {
			pgtest.FlushStatistics(t, conn)
			require.NoError(t, conn.QueryRow(t.Context(), `select sum(seq_tup_read + idx_tup_fetch) from pg_stat_user_tables
				where schemaname = 'metered' and relname in ('leases', 'lease_sum', 'lease_spends', 'hold_lines', 'ledger')`).Scan(&n))
			return n
		}
		before := read()
		fn()
		return read() - before
	}

	first := openLeases(10)
	for range 8 { // past the plans that are made for their values
		refuse(100, time.Hour+10*time.Second)
	}
	few := rows(func() { refuse(100, time.Hour+10*time.Second) })
	verified()
	n := pgtest.Size[int64](200, 1000)
	more := openLeases(int(n))
	many := rows(func() { refuse(100+10*n, time.Hour+time.Duration(n)*time.Second) })
	t.Logf("rows read by two refusals: %d, and %d", few, many)
	require.Equal(t, few, many)
	verified()

	settle(more[n/2:])
	refuse(100+5*n, time.Hour+time.Duration(n/2)*time.Second)
	verified()
	settle(more[:n/2])
	refuse(100, time.Hour+10*time.Second)
	clock.Advance(time.Minute)
	settle(first[1:])
	refuse(10, time.Hour+time.Second-time.Minute)
	verified()
	_, err = conn.Exec(t.Context(), `update metered.lease_sum set granted = 11`)
	require.NoError(t, err)
	report, err := f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Len(t, report.Differences, 1)
	require.Equal(t, []string{"sum of open leases", "11", "10"}, []string{report.Differences[0].Field, report.Differences[0].Got, report.Differences[0].Want})
	_, err = conn.Exec(t.Context(), `update metered.lease_sum set granted = 10`)
	require.NoError(t, err)
	settle(first[:1])
	verified()
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from metered.lease_sum`).Scan(&left))
	require.Zero(t, left, "a scope without open leases has no row")
}

// A lease that the refused transaction has opened itself is among its own units. It is no lease of others, and no hold either.
func TestRefusal_CountsALeaseOfItsOwnTransactionOnce(t *testing.T) {
	t.Parallel()
	f := carver(t, 1000)
	pgtest.SetClock(t, f.db, time.Date(2030, 1, 5, 12, 0, 0, 0, time.UTC))
	require.NoError(t, f.hold("a", "user", 5, 45*time.Minute))
	carve := func(tx pgx.Tx, child string, units int64, ttl time.Duration) error {
		_, err := f.carver.Carve(t.Context(), tx, leases.Carving{From: budget.Charge{Scope: "user", Amount: units}, Child: child, TTL: ttl})
		return err
	}
	require.NoError(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error { return carve(tx, "other", 100, 30*time.Minute) }))
	for _, level := range levels {
		tx, err := f.db.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		defer tx.Rollback(context.Background())
		require.NoError(t, carve(tx, "run", 50, 9*time.Hour))
		for amount, after := range map[int64]time.Duration{900: 30 * time.Minute, 990: budget.Never} {
			_, err = f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "user", Amount: amount, Limits: []budget.Limit{budget.PerWindow(1000, 24*time.Hour)}})
			var refused *budget.ExceededError
			require.ErrorAs(t, err, &refused)
			r := refused.Refusals[0]
			require.EqualValues(t, []int64{5, 100, 50, 845}, []int64{r.Held, r.Leased, r.OwnHeld, r.Available})
			require.Equal(t, after, r.RetryAfter, "%s %d", level, amount)
		}
		require.NoError(t, tx.Rollback(context.Background()))
	}
}

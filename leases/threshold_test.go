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

// A lease counts whole when it is opened: that tells, and what is spent of it does not tell again.
func TestThreshold_IsToldByLeasesAndCarvings(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	_, err := f.db.Exec(t.Context(), `create table told (scope text, name text)`)
	require.NoError(t, err)
	cfg := budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		if c.Scope == "hot" && c.Threshold.Name == "200" && c.Held < 200 {
			c.Threshold.Name = "200 by a charge"
		}
		_, err := tx.Exec(ctx, `insert into told values ($1, $2)`, c.Scope, c.Threshold.Name)
		return err
	}}
	told := func(scope, name string) (n int) {
		require.NoError(t, f.db.QueryRow(t.Context(), `select count(*) from told where scope = $1 and name = $2`, scope, name).Scan(&n))
		return n
	}
	p, err := leases.New(f.db, leases.Config{Ledger: cfg, Rules: []leases.Rule{{Share: 2, Least: 200}}, OnError: func(err error) { t.Log(err) }})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	limit := budget.Lifetime(1000).Tell(budget.Threshold{Name: "5", Used: 5}, budget.Threshold{Name: "200", Used: 200, Rearm: 150})

	f.warm(p, charge(5, limit))
	require.Equal(t, 1, told("hot", "5"), "by the first charge, which went to the ledger")
	require.Equal(t, 1, told("hot", "200"), "by the lease, before its units were spent")
	for range 5 {
		_, err := f.spend(p, pgx.ReadCommitted, charge(5, limit))
		require.NoError(t, err)
	}
	require.Equal(t, 1, told("hot", "200"))

	direct := budget.Charge{Scope: "direct", Amount: 5, Limits: []budget.Limit{limit}}
	require.NoError(t, p.Allow(t.Context(), direct))
	require.Equal(t, 1, told("direct", "5"))
	require.NoError(t, p.Close(t.Context()))

	ledger, err := budget.New(cfg)
	require.NoError(t, err)
	carver, err := leases.NewCarver(ledger)
	require.NoError(t, err)
	for i, child := range []string{"child", "other child"} {
		_, err = pgtest.InTx(t.Context(), f.db, func(tx pgx.Tx) (leases.Lease, error) {
			return carver.Carve(t.Context(), tx, leases.Carving{Child: child, TTL: time.Hour,
				From: budget.Charge{Scope: "parent", Amount: 100, Limits: []budget.Limit{limit}}})
		})
		require.NoError(t, err)
		require.Equal(t, 1, told("parent", "5"))
		require.Equal(t, i, told("parent", "200"))
	}
}

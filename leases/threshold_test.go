package leases_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// A lease counts whole when it is opened. Opening it reports the threshold, and spends from it do not report it again.
func TestThreshold_IsReportedByLeasesAndCarvings(t *testing.T) {
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
	ledger, err := budget.New(cfg)
	require.NoError(t, err)
	p, err := leases.New(f.db, ledger, leases.Config{Rules: []leases.Rule{{Share: 2, MinSlice: 200, TTL: time.Minute, Idle: time.Minute}}, OnError: func(err error) { t.Log(err) }})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	limit := budget.Lifetime(1000).WithThresholds(budget.Threshold{Name: "5", Used: 5}, budget.Threshold{Name: "200", Used: 200, Rearm: 150})

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

// A lease holds its units, and a threshold on spending alone ignores held units. A pool that settles its own lease
// reports the threshold. For leases of others, and for carvings, the next call that carries the threshold reports it.
func TestThreshold_OnSpendingIsReportedWhenALeaseIsSettled(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	_, err := f.db.Exec(t.Context(), `create table told (scope text, name text, used bigint, held bigint, seq bigint)`)
	require.NoError(t, err)
	var fail atomic.Bool
	cfg := budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		if fail.Load() {
			return errors.New("not now")
		}
		_, err := tx.Exec(ctx, `insert into told values ($1, $2, $3, $4, $5)`, c.Scope, c.Threshold.Name, c.Used, c.Held, c.Seq)
		return err
	}}
	told := func() []string {
		rows, err := f.db.Query(t.Context(), `with gone as (delete from told returning *)
			select format('%s %s: %s used, %s held, by %s', scope, name, used, g.held, l.kind) from gone g join metered.ledger l using (scope, seq)`)
		require.NoError(t, err)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	limit := budget.Lifetime(1000).WithThresholds(budget.Threshold{Name: "20", Used: 20, Spent: true}, budget.Threshold{Name: "100", Used: 100, Spent: true})
	ledger, err := budget.New(cfg)
	require.NoError(t, err)
	pool := func() *leases.Pool {
		p, err := leases.New(f.db, ledger, leases.Config{Rules: []leases.Rule{{Share: 2, MinSlice: 200, TTL: time.Minute, Idle: time.Minute}}, OnError: func(err error) { t.Log(err) }})
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close(context.Background()) })
		return p
	}
	p := pool()
	f.warm(p, charge(1, limit))
	before, err := f.spend(p, pgx.ReadCommitted, charge(1, limit))
	require.NoError(t, err)
	require.NotZero(t, before.Entries[0].Lease)
	require.Empty(t, told(), "it holds 200 and more")
	for range 5 {
		_, err := f.spend(p, pgx.ReadCommitted, charge(5, limit))
		require.NoError(t, err)
	}
	require.Empty(t, told(), "spends from a lease do not lock the scope")
	require.NoError(t, p.Close(t.Context()))
	used := pgtest.Value[int64](t, f.db, `select spent from metered.ledger where scope = 'hot' order by seq desc limit 1`)
	require.Greater(t, used, int64(20))
	require.Equal(t, []string{fmt.Sprintf("hot 20: %d used, %d held, by u", used, pgtest.Value[int64](t, f.db, `select held from metered.ledger where scope = 'hot' and kind = 'u'`))}, told())

	fail.Store(true)
	p = pool()
	late := budget.Lifetime(1000).WithThresholds(budget.Threshold{Name: "150", Used: 150, Spent: true})
	warm := f.warmAllow(p, budget.Charge{Scope: "other", Amount: 1, Limits: []budget.Limit{late}})
	require.NoError(t, p.Allow(t.Context(), budget.Charge{Scope: "other", Amount: 150, Limits: []budget.Limit{late}}))
	require.NoError(t, p.Close(t.Context()), "the lease is settled although the report fails")
	require.Empty(t, told())
	require.Equal(t, warm+150, f.usage("other").Used, "the settled units count as used")
	fail.Store(false)

	_, err = pgtest.InTx(t.Context(), f.db, func(tx pgx.Tx) (budget.Receipt, error) {
		return ledger.Charge(t.Context(), tx, charge(100-used, limit))
	})
	require.NoError(t, err)
	require.Equal(t, []string{"hot 100: 100 used, 0 held, by c"}, told())
	_, err = pgtest.InTx(t.Context(), f.db, func(tx pgx.Tx) (budget.Receipt, error) {
		return ledger.Charge(t.Context(), tx, budget.Charge{Scope: "other", Amount: 1, Limits: []budget.Limit{late}})
	})
	require.NoError(t, err)
	require.Equal(t, []string{fmt.Sprintf("other 150: %d used, 0 held, by c", warm+151)}, told(), "the next charge reported it")

	carver, err := leases.NewCarver(ledger)
	require.NoError(t, err)
	from := budget.Charge{Scope: "parent", Amount: 100, Limits: []budget.Limit{limit}}
	_, err = pgtest.InTx(t.Context(), f.db, func(tx pgx.Tx) (leases.Lease, error) {
		return carver.Carve(t.Context(), tx, leases.Carving{Child: "child", TTL: time.Hour, From: from})
	})
	require.NoError(t, err)
	_, err = pgtest.InTx(t.Context(), f.db, func(tx pgx.Tx) (leases.Lease, error) {
		if _, err := ledger.Charge(t.Context(), tx, budget.Charge{Scope: "child", Amount: 30, Limits: []budget.Limit{budget.Prepaid(0)}}); err != nil {
			return leases.Lease{}, err
		}
		return carver.End(t.Context(), tx, "child", budget.Note{})
	})
	require.NoError(t, err)
	require.Empty(t, told())
	from.Amount = 1
	_, err = pgtest.InTx(t.Context(), f.db, func(tx pgx.Tx) (budget.Receipt, error) { return ledger.Charge(t.Context(), tx, from) })
	require.NoError(t, err)
	require.Equal(t, []string{"parent 20: 31 used, 0 held, by c"}, told())
}

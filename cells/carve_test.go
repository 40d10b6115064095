package cells_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// A budget of all cells is carved for each, as for clusters. A tenant that moves charges the part of its new cell.
// Its charges of the old cell's part stay there.
func TestCarve_OneBudgetSpansCells(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	w := newWorld(t, 2, database(t), database(t))
	r := w.router()
	plain := []*metered.Client{}
	carvers := []*leases.Carver{}
	for i, pool := range w.pools {
		c, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: w.schemas[i]}})
		require.NoError(t, err)
		carver, err := leases.NewCarver(c.Budget)
		require.NoError(t, err)
		plain, carvers = append(plain, c), append(carvers, carver)
	}
	at := func(i int, fn func(ctx context.Context, tx pgx.Tx) error) {
		t.Helper()
		require.NoError(t, plain[i].RunTx(t.Context(), pgx.TxOptions{}, fn))
	}
	parts := []string{"all/0", "all/1"}
	at(0, func(ctx context.Context, tx pgx.Tx) error {
		_, err := plain[0].Budget.Credit(ctx, tx, budget.Credit{Scope: "all", Amount: 100})
		return err
	})
	from := budget.Charge{Scope: "all", Amount: 40, Limits: []budget.Limit{budget.Prepaid(0)}}
	at(0, func(ctx context.Context, tx pgx.Tx) error {
		_, err := carvers[0].Carve(ctx, tx, leases.Carving{Child: parts[0], From: from, TTL: time.Hour})
		return err
	})
	var away leases.Lease
	at(0, func(ctx context.Context, tx pgx.Tx) (err error) {
		away, err = carvers[0].Carve(ctx, tx, leases.Carving{Child: parts[1], From: from, TTL: time.Hour, Away: true})
		return err
	})
	at(1, func(ctx context.Context, tx pgx.Tx) error {
		_, err := carvers[1].Receive(ctx, tx, away, budget.Note{})
		return err
	})
	charge := func(id, part string, amount int64) error {
		_, err := do(t.Context(), r, metered.Command{ID: id, Tenant: "acme", Charges: []budget.Charge{
			{Scope: "acme", Amount: amount}, {Scope: part, Amount: amount, Limits: []budget.Limit{budget.Prepaid(0)}},
		}}, func(context.Context, *metered.Tx) (int, error) { return 1, nil })
		return err
	}
	first := r.First("acme")
	require.NoError(t, charge("1", parts[first], 30))
	require.ErrorIs(t, charge("2", parts[first], 11), budget.ErrExceeded)
	w.move(r, "acme", 1-first)
	require.NoError(t, charge("1", parts[first], 30)) // its record
	require.NoError(t, charge("3", parts[1-first], 25))
	require.ErrorIs(t, charge("4", parts[1-first], 16), budget.ErrExceeded)
	used := map[int]int64{first: 30, 1 - first: 25}
	at(1, func(ctx context.Context, tx pgx.Tx) error {
		l, err := carvers[1].End(ctx, tx, parts[1], budget.Note{})
		require.Equal(t, used[1], l.Spent)
		return err
	})
	at(0, func(ctx context.Context, tx pgx.Tx) error {
		_, err := carvers[0].SettleAway(ctx, tx, parts[1], used[1], budget.Note{})
		require.NoError(t, err)
		_, err = carvers[0].End(ctx, tx, parts[0], budget.Note{})
		require.NoError(t, err)
		u, err := plain[0].Budget.Usage(ctx, tx, budget.Query{Scope: "all"})
		require.Equal(t, []int64{55, 0}, []int64{u[0].Spent, u[0].Held})
		return err
	})
	w.verified()
}

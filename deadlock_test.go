package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A command captures a hold and charges. While it waits for its scope the hold is placed, on
// another scope, whose lock comes first in the one order. Would the capture see the hold, it
// would lock that scope late, and could deadlock with a charge of both.
func TestDo_AHoldThatIsPlacedWhileItWaitsIsNotLockedLate(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, c := setUp(t, metered.Config{})
	own, placed := "a", "b"
	if c.Budget.LockKey(own) < c.Budget.LockKey(placed) {
		own, placed = placed, own
	}
	release := lockScope(t, pool, c, own)
	command := pgtest.Going(func() error {
		_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
			if err := tx.Capture(holds.Capture{IDs: []string{"h"}, All: true}); err != nil {
				return nil, err
			}
			return nil, tx.Charge(budget.Charge{Scope: own, Amount: 1})
		})
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	_, err := pgtest.InTx(ctx, pool, func(tx pgx.Tx) (holds.Hold, error) {
		return c.Holds.Place(ctx, tx, holds.Request{ID: "h", TTL: time.Minute, Lines: []holds.Line{{Scope: placed, Amount: 1}}})
	})
	require.NoError(t, err)
	charge := pgtest.Going(func() error {
		_, err := pgtest.InTx(ctx, pool, func(tx pgx.Tx) (budget.Receipt, error) {
			return c.Budget.Charge(ctx, tx, budget.Charge{Scope: own, Amount: 1}, budget.Charge{Scope: placed, Amount: 1})
		})
		return err
	})
	pgtest.WaitQueued(t, pool, 2)
	release()
	require.NoError(t, <-charge)
	require.NoError(t, <-command)
	require.Zero(t, queryRow[int](t, pool, `select deadlocks from pg_stat_database where datname = current_database()`))
	require.Equal(t, int64(2), used(t, pool, c, own))
	require.Equal(t, int64(2), used(t, pool, c, placed))
}

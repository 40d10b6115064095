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
)

// A charge of the hold was refunded by hand: the command must not commit without the
// refund that it was to make.
func TestDo_FailsWithARefundOfAHoldThatIsRefused(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := metered.Do(ctx, c, metered.Command{ID: "op1", Input: 1}, placing(holds.Request{ID: "h1", TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 1)}}))
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{"h1"}, All: true}); err != nil {
			return err
		}
		_, err := c.Budget.Refund(ctx, tx, budget.Refund{Scope: "seat", Seq: 2, Amount: 1})
		return err
	}))
	refund := func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Refund(holds.Refund{IDs: []string{"h1"}, Lines: []holds.Line{{Scope: "seat", Amount: 1}}})
	}
	_, err = metered.Do(ctx, c, metered.Command{ID: "op2", Input: 1}, refund)
	require.ErrorIs(t, err, holds.ErrExcess)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op2", Input: 1}, refund)
		require.ErrorIs(t, err, holds.ErrExcess)
		return nil
	}))
}

package holds_test

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

// A hold that a charge of one of its scopes ended still keeps room of the others. Whoever says that
// it was announced does not have it purged with that.
func TestRole_AnnouncingAHoldLosesNoneOfItsUnits(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	owner.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 10, 10), capacity("b", 10, 10)}})
	owner.clock.Advance(time.Minute)
	_, err := app.charge(budget.Charge{Scope: "a", Amount: 10, Limits: []budget.Limit{budget.Lifetime(10)}})
	require.NoError(t, err)
	_, err = app.pool.Exec(t.Context(), `select metered.announced('{1}', null)`)
	require.NoError(t, err)
	owner.clock.Advance(time.Hour)
	_, err = owner.book.Purge(t.Context(), owner.pool, holds.PurgeOptions{OlderThan: time.Minute})
	require.NoError(t, err)
	owner.verify()
	_, err = app.charge(budget.Charge{Scope: "b", Amount: 10, Limits: []budget.Limit{budget.Lifetime(10)}})
	require.NoError(t, err)
}

// A scope whose clock was repaired since the snapshot is not refused for good.
func TestCharge_AClockRepairedSinceTheSnapshotIsRetryable(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.clock.Advance(time.Hour)
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	f.clock.Advance(-time.Hour)
	tx, err := f.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), "select 1")
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.ClockRepair, error) {
		return f.ledger.RepairClock(ctx, tx, "a", budget.Note{})
	})
	require.NoError(t, err)
	_, err = f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.PerWindow(5, time.Minute)}})
	require.Equal(t, "40001", code(err), "%v", err)
}

// Two refunds of the same part give it back once each, as far as there is something left.
func TestRefund_RacesGiveBackNoMoreThanWasCaptured(t *testing.T) {
	t.Parallel()
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			f := setUp(t, holds.Config{})
			f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 10, 10), capacity("b", 7, 10)}})
			_, err := f.capture(holds.Capture{IDs: []string{"h"}, All: true})
			require.NoError(t, err)
			_ = pgtest.InParallel(8, func(n int) error {
				for i := range 6 {
					_ = pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: iso}, func(tx pgx.Tx) error {
						var err error
						switch (n + i) % 3 {
						case 0:
							_, err = f.book.Refund(t.Context(), tx, holds.Refund{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "a", Amount: 3}}})
						case 1:
							_, err = f.book.Refund(t.Context(), tx, holds.Refund{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "b", Amount: 2}, {Scope: "a", Amount: 1}}})
						default:
							_, err = f.ledger.Refund(t.Context(), tx, budget.Refund{Scope: "a", Seq: 2, Amount: 1})
						}
						return err
					})
				}
				return nil
			})
			f.verify()
		})
	}
}

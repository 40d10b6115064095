package holds_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

// Verify reads while everything moves, and finds no difference.
func TestVerify_IsQuietUnderTraffic(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	f := setUp(t, holds.Config{})
	var stop atomic.Bool
	time.AfterFunc(pgtest.Size(time.Second, 6*time.Second), func() { stop.Store(true) })
	scopes := []string{"a", "b", "c"}
	_ = pgtest.InParallel(6, func(w int) error {
		for i := 0; !stop.Load(); i++ {
			id := fmt.Sprintf("%d-%d", w, i)
			lines := []holds.Line{capacity(scopes[i%3], 2, 1000), capacity(scopes[(i+1)%3], 1, 1000)}
			_ = pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
				_, err := f.book.Place(t.Context(), tx, holds.Placement{ID: id, TTL: 3 * time.Second, Lines: lines})
				return err
			})
			switch i % 4 {
			case 0:
				_, _ = f.capture(holds.Capture{IDs: []string{id}, All: true})
				_, _ = do(f, refund(f, id))
			case 1:
				_, _ = f.release(id)
			case 2:
				_, _ = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
				_, _ = f.charge(budget.Charge{Scope: scopes[i%3], Amount: 1})
			}
			switch w {
			case 0:
				report, err := f.ledger.Verify(t.Context(), f.pool, budget.VerifyOptions{})
				if err != nil || len(report.Differences) > 0 {
					f.Errorf("%v %v", err, report.Differences)
				}
			case 1:
				f.clock.Advance(time.Second)
			case 2, 3:
				_, err := f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: 5 * time.Second, Batch: 16, Forget: func(s string) bool { return s == "c" }})
				if err != nil {
					f.Errorf("%v", err)
				}
				_, _ = purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Second})
			}
		}
		return nil
	})
	f.verify()
}

// Lines of a hold that several captures spent are refunded, with any part of them purged.
func TestRefund_AfterAPurgeOfOneOfTwoCaptures(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h", TTL: 50 * time.Minute, Lines: []holds.Line{capacity("power", 10, 10)}})
	_, err := f.capture(holds.Capture{IDs: []string{"h"}, Keep: true, Lines: []holds.Line{{Scope: "power", Amount: 1}}})
	require.NoError(t, err)
	for range 40 {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
			return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "power", Amount: 1})
		})
		require.NoError(t, err)
	}
	f.clock.Advance(20 * time.Minute)
	_, err = f.capture(holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "power", Amount: 3}}})
	require.NoError(t, err)
	part := func(n int64) error {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return f.book.Return(ctx, tx, holds.Return{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "power", Amount: n}}})
		})
		return err
	}
	require.NoError(t, part(2))
	_, err = f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{Scope: "power", OlderThan: time.Minute})
	require.NoError(t, err)
	require.ErrorIs(t, part(3), holds.ErrExcess)
	f.verify()
	// All of the purged charge was given back before: nothing is left that could not be.
	hs, err := do(f, refund(f, "h"))
	require.NoError(t, err)
	require.Equal(t, int64(4), hs[0].Lines[0].Refunded)
	require.Equal(t, holds.Returned, hs[0].State)
	f.verify()
}

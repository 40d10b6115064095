package holds_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// What a transaction has placed and released again is not held by it, also where one call released
// several holds: the refusal waits for the others.
func TestRefusal_OwnHoldsReleasedTogetherAreNoLongerHeld(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Request{TTL: 5 * time.Minute, Lines: []holds.Line{capacity("w", 6, 10)}})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		for _, id := range []string{"a", "b"} {
			_, err := f.book.Place(ctx, tx, holds.Request{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("w", 2, 10)}})
			require.NoError(t, err)
		}
		_, err := f.book.Release(ctx, tx, holds.Release{IDs: []string{"a", "b"}})
		require.NoError(t, err)
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 6, Limits: []budget.Limit{budget.Lifetime(10)}})
	})
	r := refusal(t, err)
	require.Equal(t, []int64{6, 0}, []int64{r.Held, r.OwnHeld})
	require.Equal(t, 5*time.Minute, r.RetryAfter)
}

// Holds of others that this transaction ended are not taken for its own.
func TestRefusal_OwnHoldsBesideOnesOfOthersThatFellDue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before, after []string // what the transaction places before and after the others' hold falls due
		held, own     int64
		retry         time.Duration
	}{
		"placed after":               {after: []string{"a"}, held: 3, own: 2, retry: 5 * time.Minute},
		"placed before, and due too": {before: []string{"a"}, held: 3, retry: 5 * time.Minute},
		"one of each":                {before: []string{"a"}, after: []string{"b"}, held: 3, own: 2, retry: 5 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			f.clock.Set(noon)
			f.mustPlace(holds.Request{ID: "kept", TTL: 6 * time.Minute, Lines: []holds.Line{capacity("w", 3, 10)}})
			f.mustPlace(holds.Request{ID: "due", TTL: time.Minute, Lines: []holds.Line{capacity("w", 4, 10)}})
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
				place := func(ids []string) {
					for _, id := range ids {
						_, err := f.book.Place(ctx, tx, holds.Request{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("w", 2, 10)}})
						require.NoError(t, err)
					}
				}
				place(c.before)
				f.clock.Set(noon.Add(time.Minute))
				_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 1, Limits: []budget.Limit{budget.Lifetime(5)}})
				require.NoError(t, err, "what is due is freed for it")
				place(c.after)
				return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 7, Limits: []budget.Limit{budget.Lifetime(10)}})
			})
			r := refusal(t, err)
			require.Equal(t, []int64{c.held, c.own}, []int64{r.Held, r.OwnHeld})
			require.Equal(t, c.retry, r.RetryAfter)
		})
	}
}

// A hold of another that this transaction has extended falls due for everybody, it included.
func TestRefusal_AfterAnExtensionNamesWhenTheHoldFallsDue(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Request{ID: "first", TTL: time.Minute, Lines: []holds.Line{capacity("w", 3, 10)}})
	f.mustPlace(holds.Request{ID: "later", TTL: 5 * time.Minute, Lines: []holds.Line{capacity("w", 3, 10)}})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		_, err := f.book.Extend(ctx, tx, holds.Extend{IDs: []string{"first"}, By: 2 * time.Minute})
		require.NoError(t, err)
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 5, Limits: []budget.Limit{budget.Lifetime(10)}})
	})
	require.Equal(t, 3*time.Minute, refusal(t, err).HoldDue)
}

// The same id in two tenants is two holds.
func TestRefusal_OwnHoldsOfTwoTenantsUnderOneID(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		for _, tenant := range []string{"t1", "t2"} {
			_, err := f.book.Place(ctx, tx, holds.Request{Tenant: tenant, ID: "a", TTL: time.Minute, Lines: []holds.Line{capacity("w", 4, 10)}})
			require.NoError(t, err)
		}
		_, err := f.book.Release(ctx, tx, holds.Release{Tenant: "t2", IDs: []string{"a"}})
		require.NoError(t, err)
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 9, Limits: []budget.Limit{budget.Lifetime(10)}})
	})
	r := refusal(t, err)
	require.Equal(t, []int64{0, 4}, []int64{r.Held, r.OwnHeld})
}

// What was given back in part stays given back when the rest of its charge was purged.
func TestRefund_OfTheRestOfAPurgedChargeKeepsWhatWasGivenBack(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("power", 10, 10), capacity("water", 3, 9)}})
	_, err := f.capture(holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Refund(ctx, tx, holds.Refund{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "power", Amount: 4}}})
	})
	require.NoError(t, err)
	f.purgeOf("power")
	hs, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Refund(ctx, tx, holds.Refund{IDs: []string{"h"}, All: true, SkipPurged: true})
	})
	require.NoError(t, err)
	require.Equal(t, holds.Returned, hs[0].State)
	f.verify()
	require.Equal(t, int64(4), hs[0].Lines[0].Refunded)
}

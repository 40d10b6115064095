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

// forget purges the ledger of scopes that have been idle for a minute.
func (f *fixture) forget() (forgotten int) {
	f.Helper()
	report, err := f.ledger.Purge(f.Context(), f.pool, budget.PurgeOptions{OlderThan: time.Minute, Forget: func(string) bool { return true }})
	require.NoError(f, err)
	return report.Forgotten
}

func TestForget_AScopeIsKeptWhileAHoldOrAClaimOfItCounts(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	f := setUp(t, holds.Config{})
	name := holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann", TTL: time.Hour}
	claim, err := f.claim(name)
	require.NoError(t, err)
	f.mustPlace(holds.Request{Lines: []holds.Line{{Scope: "stock", Amount: 1}}, TTL: time.Hour})
	f.clock.Advance(30 * time.Minute)
	require.Zero(t, f.forget(), "both are held")

	_, err = f.capture(holds.Capture{IDs: []string{claim.ID}, All: true})
	require.NoError(t, err)
	f.clock.Advance(24 * time.Hour)
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Zero(t, f.forget(), "the claim stands, and the stock was free a moment ago")
	f.clock.Advance(24 * time.Hour)
	require.Equal(t, 1, f.forget(), "the stock")
	name.Holder = "bob"
	_, err = f.claim(name)
	require.ErrorIs(t, err, holds.ErrTaken)

	_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Refund(ctx, tx, holds.Refund{IDs: []string{claim.ID}, All: true})
	})
	require.NoError(t, err)
	f.clock.Advance(24 * time.Hour)
	require.Equal(t, 1, f.forget(), "the claim was given back")
	claim, err = f.claim(name)
	require.NoError(t, err)
	_, err = f.release(claim.ID)
	require.NoError(t, err)
	f.clock.Advance(24 * time.Hour)
	require.Equal(t, 1, f.forget(), "the claim was released")
	f.mustPlace(holds.Request{Lines: []holds.Line{{Scope: claim.Lines[0].Scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}})
	f.verify()
}

// Its hold is how a claim that was captured is found, and given back: a purge leaves it
// until then.
func TestPurge_KeepsAClaimThatStands(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	name := holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann"}
	claim, err := f.claim(name)
	require.NoError(t, err)
	_, err = f.capture(holds.Capture{IDs: []string{claim.ID}, All: true})
	require.NoError(t, err)
	purge := func() int64 {
		f.clock.Set(later(f.clock.Now(), time.Now()).Add(time.Hour)) // the claim's id has the machine's time
		n, err := f.purge()
		require.NoError(t, err)
		return n
	}
	require.Zero(t, purge())
	name.Holder = "bob"
	_, err = f.claim(name)
	require.ErrorIs(t, err, holds.ErrTaken)
	_, err = do(f, refund(f, claim.ID))
	require.NoError(t, err)
	require.Equal(t, int64(1), purge())
	_, err = f.claim(name)
	require.NoError(t, err)
	f.verify()
}

// A hold remembers the charge that captured it by its number, which is another's by
// now: of a hold of the same id, even, in another tenant.
func TestForget_ACaptureThatWasForgottenIsNotRefundedFromAnother(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	use := func(tenant string) {
		f.mustPlace(holds.Request{Tenant: tenant, ID: "h", Lines: []holds.Line{{Scope: "stock", Amount: 1}}})
		_, err := f.capture(holds.Capture{Tenant: tenant, IDs: []string{"h"}, All: true})
		require.NoError(t, err)
	}
	refund := func(tenant string) error {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return f.book.Refund(ctx, tx, holds.Refund{Tenant: tenant, IDs: []string{"h"}, All: true})
		})
		return err
	}
	use("a")
	f.clock.Advance(time.Hour)
	require.Equal(t, 1, f.forget())
	require.ErrorIs(t, refund("a"), holds.ErrNotReturnable)
	use("b")
	require.ErrorIs(t, refund("a"), holds.ErrNotReturnable)
	require.NoError(t, refund("b"))
	used, _ := f.usage("stock")
	require.Zero(t, used)
}

// Nor where the clock was set back since, to the very time of that charge.
func TestForget_NorFromOneOfTheSameTime(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, id := range []string{"forgotten", "there"} {
		f.clock.Set(noon)
		f.mustPlace(holds.Request{ID: id, Lines: []holds.Line{{Scope: "stock", Amount: 1}}})
		_, err := f.capture(holds.Capture{IDs: []string{id}, All: true})
		require.NoError(t, err)
		if id == "forgotten" {
			f.clock.Advance(time.Hour)
			require.Equal(t, 1, f.forget())
		}
	}
	f.refused(holds.Refund{IDs: []string{"forgotten"}, All: true}, holds.ErrNotReturnable)
	_, err := do(f, refund(f, "there"))
	require.NoError(t, err)
	f.verify()
}

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

// inBlock is a line of a block of three seats, which must exist.
func inBlock(name string) holds.Line {
	return holds.Line{Scope: "block/" + name, Amount: 1, Limits: []budget.Limit{budget.Lifetime(3)}, MustExist: true}
}

func (f *fixture) create(scopes ...string) {
	f.Helper()
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]budget.Resource, error) {
		return f.ledger.Create(ctx, tx, scopes...)
	})
	require.NoError(f, err)
}

func (f *fixture) retire(scope string) budget.Resource {
	f.Helper()
	all, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]budget.Resource, error) {
		return f.ledger.Retire(ctx, tx, scope)
	})
	require.NoError(f, err)
	return all[0]
}

// Lines, claims and the charges of both.
func TestPlace_OfAScopeThatMustExistAndDoesNot(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.create("block/A")
	lines := func(name string) []holds.Line { return []holds.Line{inBlock(name)} }
	claim := func(number string) holds.Claim {
		return holds.Claim{Key: holds.Key{Type: "seat", Value: "7/" + number}, Holder: "ann", Lines: lines("A"), MustExist: true}
	}
	placed := func(r holds.Placement) error { _, err := f.place(r); return err }
	claimed := func(c holds.Claim) error { _, err := f.claim(c); return err }
	before := f.dump()
	require.ErrorIs(t, placed(holds.Placement{ID: "h", Lines: lines("a")}), budget.ErrScopeUnknown)
	require.ErrorIs(t, placed(holds.Placement{Lines: lines("a")}), budget.ErrScopeUnknown)
	require.ErrorIs(t, placed(holds.Placement{Lines: lines("A"), Charges: []budget.Charge{{Scope: "typo", Amount: 1, MustExist: true}}}), budget.ErrScopeUnknown)
	require.ErrorIs(t, claimed(claim("21A")), budget.ErrScopeUnknown)
	require.Equal(t, before, f.dump(), "nothing was written")

	scope, err := claim("21A").Key.Scope("")
	require.NoError(t, err)
	f.create(scope)
	require.NoError(t, claimed(claim("21A")))
	require.NoError(t, placed(holds.Placement{ID: "h", Lines: lines("A")}))
	f.retire(scope)
	require.NoError(t, claimed(claim("21A")), "the same claim is had again")
	other := claim("21A")
	other.Holder = "eve"
	require.ErrorIs(t, claimed(other), holds.ErrTaken)
	f.clock.Advance(time.Minute)
	require.ErrorIs(t, claimed(other), budget.ErrScopeRetired)

	// The ledger demands it of all.
	strict, err := budget.New(budget.Config{MustExist: true})
	require.NoError(t, err)
	f.book, err = holds.New(strict, holds.Config{})
	require.NoError(t, err)
	require.ErrorIs(t, placed(holds.Placement{Lines: []holds.Line{{Scope: "typo", Amount: 1}}}), budget.ErrScopeUnknown)
	require.ErrorIs(t, claimed(holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann"}), budget.ErrScopeUnknown)
	require.NoError(t, placed(holds.Placement{Lines: []holds.Line{{Scope: "block/A", Amount: 1}}}))
	f.verify()
}

// Holds from before a scope was retired are kept: they end as any, and Retire returns how much they keep.
func TestRetire_OpenHoldsGoOnAndEnd(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.create("block/A")
	for _, id := range []string{"captured", "released", "extended", "expired"} {
		f.mustPlace(holds.Placement{ID: id, Lines: []holds.Line{{Scope: "block/A", Amount: 2, MustExist: true}}})
	}
	f.mustPlace(holds.Placement{ID: "short", TTL: time.Second, Lines: []holds.Line{{Scope: "block/A", Amount: 5}}})
	f.clock.Advance(time.Second)
	require.Equal(t, int64(8), f.retire("block/A").Held, "without due units")
	_, err := f.place(holds.Placement{Lines: []holds.Line{inBlock("A")}})
	require.ErrorIs(t, err, budget.ErrScopeRetired)

	_, err = f.extend(time.Minute, "extended")
	require.NoError(t, err)
	_, err = f.release("released")
	require.NoError(t, err)
	// Also beyond the held units: the cost of work that was promised.
	_, err = f.capture(holds.Capture{IDs: []string{"captured"}, Lines: []holds.Line{{Scope: "block/A", Amount: 3, MustExist: true}}, Over: holds.OverAllowed})
	require.NoError(t, err)
	require.Equal(t, int64(4), f.retire("block/A").Held)
	f.clock.Advance(time.Minute)
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, holds.Expired, f.get("expired").State)
	require.Equal(t, int64(2), f.retire("block/A").Held)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: []string{"captured"}, All: true})
	})
	require.NoError(t, err)
	used, held := f.usage("block/A")
	require.Equal(t, []int64{0, 2}, []int64{used, held})
	f.verify()
}

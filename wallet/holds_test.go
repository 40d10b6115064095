package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

func (f *fixture) place(id string, amount int64, ttl time.Duration) holds.Hold {
	f.Helper()
	h, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		return f.holds.Place(ctx, tx, holds.Placement{ID: id, TTL: ttl, Lines: []holds.Line{f.book.Line("ann", amount)}})
	})
	require.NoError(f, err)
	return h
}

func (f *fixture) capture(c holds.Capture) {
	f.Helper()
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) { return f.holds.Capture(ctx, tx, c) })
	require.NoError(f, err)
}

func (f *fixture) release(ids ...string) {
	f.Helper()
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.holds.Release(ctx, tx, holds.Release{IDs: ids})
	})
	require.NoError(f, err)
}

func TestReservation_FreedUnitsOfAnEndedLotLapseAtOnce(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"release", "capture", "keep", "deadline", "deadline swept"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 10, Reference: "hour", Ends: wallet.After(time.Hour)})
			f.grant(wallet.Grant{Amount: 10, Reference: "ever"})
			f.place("r", 13, 2*time.Hour)
			f.clock.Set(noon.Add(time.Hour))
			f.has(7)
			switch end {
			case "release":
				f.release("r")
			case "capture":
				f.capture(holds.Capture{IDs: []string{"r"}, Lines: []holds.Line{{Scope: "ann", Amount: 4}}})
			case "keep":
				f.capture(holds.Capture{IDs: []string{"r"}, Keep: true, Lines: []holds.Line{{Scope: "ann", Amount: 4}}})
				f.release("r")
			case "deadline":
				f.clock.Set(noon.Add(2 * time.Hour))
				f.has(10) // before anybody has written it down
				f.draw(10)
				f.has(0)
				return
			case "deadline swept":
				f.clock.Set(noon.Add(2 * time.Hour))
				r, err := f.holds.Sweep(t.Context(), f.pool, holds.SweepOptions{})
				require.NoError(t, err)
				require.Equal(t, 1, r.Expired)
			}
			f.has(10)
			require.Equal(t, map[string]int64{"ever": 10}, f.left())
			f.draw(10)
		})
	}
}

func TestReservation_OfOverdraftIsPaidBackToTheReservation(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 10})
	f.grant(wallet.Grant{Amount: 4, Reference: "first"})
	f.place("a", 6, day)
	f.place("b", 5, day)
	require.EqualValues(t, -7, f.balance().Units)
	f.grant(wallet.Grant{Amount: 20, Reference: "second"})
	require.Equal(t, map[string]int64{"second": 13}, f.left())
	f.release("a")
	require.Equal(t, map[string]int64{"first": 4, "second": 15}, f.left())
	f.capture(holds.Capture{IDs: []string{"b"}, All: true})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.holds.Return(ctx, tx, holds.Return{IDs: []string{"b"}, All: true})
	})
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"first": 4, "second": 20}, f.left())
}

func TestReservation_OfAScopeThatBecomesAWallet(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "ann", Amount: 10})
	})
	require.NoError(t, err)
	f.place("a", 6, day)
	f.grant(wallet.Grant{Amount: 5, Reference: "new", Ends: wallet.After(time.Hour)})
	f.has(9)
	f.release("a")
	require.Equal(t, map[string]int64{"": 10, "new": 5}, f.left())
	// A credit of the ledger is a lot that never ends, too.
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "ann", Amount: 3})
	})
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"": 13, "new": 5}, f.left())
}

func TestLease_OfAWalletKeepsItsLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 10, Reference: "ever"})
	carver, err := leases.NewCarver(f.ledger)
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		return carver.Carve(ctx, tx, leases.Carving{From: f.book.Charge("ann", 15), Child: "run", TTL: day})
	})
	require.NoError(t, err)
	require.EqualValues(t, 5, f.balance().Units)
	_, err = f.ledger.ChargeNow(t.Context(), f.pool, budget.Charge{Scope: "run", Amount: 4, Limits: []budget.Limit{budget.Prepaid(0)}})
	require.NoError(t, err)
	f.clock.Set(noon.Add(time.Hour))
	require.EqualValues(t, 5, f.balance().Units)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		return carver.End(ctx, tx, "run", budget.Note{})
	})
	require.NoError(t, err)
	f.has(10)
	kinds, amounts := f.kinds(4)
	require.Equal(t, []string{"capture", "release", "lapse"}, kinds)
	require.Equal(t, []int64{4, 11, 6}, amounts)
}

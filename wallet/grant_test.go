package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/wallet"
)

func TestGrant_OfAReferenceIsMadeOnce(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	g := wallet.Grant{Amount: 10, Reference: "invoice 1", Ends: wallet.At(noon.Add(day)), Category: "paid"}
	first := f.grant(g)
	require.False(t, first.Replayed)
	f.draw(3)
	f.clock.Set(noon.Add(2 * day)) // also after its end
	again := f.grant(g)
	require.True(t, again.Replayed)
	again.Replayed = false
	require.Equal(t, first, again)
	for _, change := range []func(*wallet.Grant){
		func(g *wallet.Grant) { g.Amount++ }, func(g *wallet.Grant) { g.Ends = wallet.At(noon.Add(day + time.Hour)) },
		func(g *wallet.Grant) { g.Category = "" }, func(g *wallet.Grant) { g.LateRefunds = wallet.Lapse },
		func(g *wallet.Grant) { g.Roll = &wallet.Roll{Cap: 1, Lasts: wallet.For(time.Hour)} }, func(g *wallet.Grant) { g.Priority = new(int) },
	} {
		other := g
		other.Wallet = "ann"
		change(&other)
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Grant(ctx, tx, other) })
		require.ErrorIs(t, err, wallet.ErrConflict)
		require.Equal(t, "wallet_conflict", metered.Code(err))
	}
	g.Wallet = "bob"
	require.Error(t, func() error {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Grant(ctx, tx, g) })
		require.ErrorIs(t, err, wallet.ErrExpired)
		require.ErrorContains(t, err, ": it ends at 2026-11-22T12:00:00Z, and it is 2026-11-23T12:00:00Z")
		return err
	}())
}

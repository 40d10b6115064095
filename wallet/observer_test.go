package wallet_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

func TestObserver_GetsLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	o := new(pgtest.Recorder)
	told := func() []string {
		all := o.Told()
		o.Forget()
		return all
	}
	var err error
	f.ledger, err = budget.New(budget.Config{Observer: o})
	require.NoError(t, err)
	f.book, err = wallet.New(f.ledger, wallet.Config{})
	require.NoError(t, err)
	for range 2 {
		f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour), Reference: "once"})
	}
	f.grant(wallet.Grant{Amount: 20, Ends: wallet.After(2 * time.Hour), Reference: "rolled"})
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (r wallet.Granted, err error) {
		_, err = f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: "rolled", Cap: 5, For: 5 * time.Hour})
		if err == nil {
			_, err = f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: "rolled", Amount: 3})
		}
		return r, err
	})
	require.NoError(t, err)
	require.Equal(t, []string{"lots granted 1 pending", "lots granted 1 pending", "lots rolled over 1 pending", "lots revoked 1 pending"}, told(),
		"a repeated grant is not a grant")

	f.clock.Set(noon.Add(3 * time.Hour))
	report, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []int{2, 0}, []int{report.Ended, report.Announced})
	require.Equal(t, 2*time.Hour, o.Lag())
	require.Equal(t, []string{"sweep_lag lots 1", "lots ended 2", "lots_lapsed  22"}, told())
	_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.Zero(t, o.Lag())
	require.Equal(t, []string{"sweep_lag lots 1"}, told(), "it was announced")

	refuses := errors.New("no")
	f.book, err = wallet.New(f.ledger, wallet.Config{Subscribers: []wallet.Subscriber{func(context.Context, pgx.Tx, wallet.Breakage) error { return refuses }}})
	require.NoError(t, err)
	f.clock.Set(noon.Add(6 * time.Hour))
	_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.ErrorIs(t, err, refuses)
	require.Equal(t, []string{"sweep_lag lots 1", "lots ended 1", "sweep_failed lots 1"}, told())
	// Units that no subscriber accepted are announced by the next sweep that succeeds.
	f.book, err = wallet.New(f.ledger, wallet.Config{})
	require.NoError(t, err)
	_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, time.Hour, o.Lag())
	require.Equal(t, []string{"sweep_lag lots 1", "lots_lapsed  5"}, told())
}

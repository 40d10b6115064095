package wallet_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A scope whose charges do not queue (tallies) becomes a wallet. The grant waits for those that are open, and counts them as
// overdraft of before the first lot; later ones draw lots.
func TestGrant_OfAScopeWithTalliesWaitsForThem(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	ctx := t.Context()
	sum := func() pgx.Tx {
		tx, err := f.pool.Begin(ctx)
		require.NoError(t, err)
		_, err = f.ledger.Charge(ctx, tx, budget.Charge{Scope: "ann", Amount: 1}, budget.Charge{Scope: "other", Amount: 1})
		require.NoError(t, err)
		return tx
	}
	first := sum()
	waits := make(chan pgx.Tx)
	go func() { waits <- sum() }()
	pgtest.WaitAdvisory(t, f.pool, 1)
	require.NoError(t, first.Commit(ctx))
	require.NoError(t, (<-waits).Commit(ctx))
	open := sum()
	require.Equal(t, 1, pgtest.Value[int](t, open, `select count(*)::int from metered.tallies where scope = 'ann'`))

	old, err := f.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	_, err = f.book.Grant(ctx, old, wallet.Grant{Wallet: "ann", Amount: 10})
	require.ErrorContains(t, err, "READ COMMITTED")
	require.NoError(t, old.Rollback(ctx))

	granted := make(chan wallet.Granted)
	go func() { granted <- f.grant(wallet.Grant{Amount: 10, Ends: wallet.At(noon.Add(time.Hour))}) }()
	pgtest.WaitAdvisory(t, f.pool, 1)
	f.clock.Advance(time.Second)
	late := make(chan pgx.Tx)
	go func() { late <- sum() }() // it waits for the scope, and draws of the lot
	pgtest.WaitAdvisory(t, f.pool, 2)
	require.NoError(t, open.Commit(ctx))
	<-granted
	require.NoError(t, (<-late).Commit(ctx))
	require.Zero(t, pgtest.Count(t, f.pool, "metered.tallies where scope = 'ann'"))
	balance, err := f.book.Balance(ctx, f.pool, "ann")
	require.NoError(t, err)
	require.Equal(t, int64(10-4), balance.Units)
	require.NoError(t, sum().Commit(ctx))
	require.Zero(t, pgtest.Count(t, f.pool, "metered.tallies where scope = 'ann'"))
}

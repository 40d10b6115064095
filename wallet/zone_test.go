package wallet_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A server can lose a time zone: Debian moved Asia/Calcutta to a package of its own. A plan of that zone stops no other wallet, Verify and a
// sweep find it, its errors name it, and it can be ended. What it brought before stays.
func TestZone_ThatTheServerHasLostStopsNoOtherWallet(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	for _, name := range []string{"bob", "ann", "cid"} {
		f.grant(wallet.Grant{Wallet: name, Amount: 10, Reference: "plan", Renews: daily})
	}
	f.grant(wallet.Grant{Wallet: "ann", Amount: 10, Reference: "other", Renews: daily})
	f.grant(wallet.Grant{Wallet: "ann", Amount: 7, Reference: "paid"})
	_, err := f.pool.Exec(t.Context(), `update metered.lot_rows set plan.renews.zone = 'Asia/Nowhere' where scope = 'ann' and ((plan).renews).every is not null`)
	require.NoError(t, err)
	f.clock.Set(noon.Add(day))

	verified, err := f.ledger.Verify(t.Context(), f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Len(t, verified.Differences, 2, "the next lots of both plans")
	for _, d := range verified.Differences {
		require.Equal(t, "ann", d.Scope)
		require.Contains(t, d.Field, "zone of lot ")
		require.Equal(t, []string{"Asia/Nowhere", "one that the server knows"}, []string{d.Got, d.Want})
	}

	report, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.ErrorIs(t, err, budget.ErrTimeZone)
	require.ErrorContains(t, err, `wallet "ann"`)
	require.ErrorContains(t, err, "Asia/Nowhere, of the plan ")
	require.Equal(t, []int{2, 1, 0}, []int{report.Ended, report.Failed, report.Busy}, "of bob and cid")
	require.EqualValues(t, 2, pgtest.Value[int64](t, f.pool, `select count(*) from metered.lots where scope <> 'ann' and rest = 10`))

	_, err = f.tryDraw(wallet.Draw{Wallet: "ann", Amount: 1})
	require.ErrorIs(t, err, budget.ErrTimeZone)
	require.ErrorContains(t, err, "Asia/Nowhere, of the plan ")
	require.ErrorContains(t, err, "of wallet ann")

	for _, reference := range []string{"plan", "other"} { // each, though the other is lost, too
		ended, err := f.revoke(wallet.Revoke{Wallet: "ann", Reference: reference, Renewals: true})
		require.NoError(t, err)
		require.Zero(t, ended.Amount)
	}
	drawn, err := f.tryDraw(wallet.Draw{Wallet: "ann", Amount: 1})
	require.NoError(t, err)
	require.EqualValues(t, 26, drawn.Left, "the lots of this day began, and none comes after them")
	f.clock.Set(noon.Add(3 * day))
	b, err := f.book.Balance(t.Context(), f.pool, "ann")
	require.NoError(t, err)
	require.LessOrEqual(t, b.Units, int64(7))
	_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
}

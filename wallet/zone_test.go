package wallet_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A server can lose a time zone: Debian moved Asia/Calcutta to a package of its own. A plan of that zone stops no other wallet, Verify and a
// sweep find it, its errors name it, and it can be ended. What it brought before stays.
func TestZone_ThatTheServerHasLostStopsNoOtherWallet(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	for _, name := range []string{"bob", "ann", "cid"} {
		f.grant(wallet.Grant{Wallet: name, Amount: 10, Reference: "plan", Ends: wallet.EachPeriod(daily)})
	}
	f.grant(wallet.Grant{Wallet: "ann", Amount: 10, Reference: "other", Ends: wallet.EachPeriod(daily)})
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
	require.ErrorIs(t, err, fault.New("budget_time_zone", ""))
	require.ErrorContains(t, err, `wallet "ann"`)
	require.ErrorContains(t, err, "Asia/Nowhere, of the plan ")
	require.Equal(t, []int{2, 1, 0}, []int{report.Ended, report.Failed, report.Busy}, "of bob and cid")
	require.EqualValues(t, 2, pgtest.Value[int64](t, f.pool, `select count(*) from metered.lots where scope <> 'ann' and rest = 10`))

	_, err = f.tryDraw(toDraw{Wallet: "ann", Amount: 1})
	require.ErrorIs(t, err, fault.New("budget_time_zone", ""))
	require.ErrorContains(t, err, "Asia/Nowhere, of the plan ")
	require.ErrorContains(t, err, "of wallet ann")

	for _, reference := range []string{"plan", "other"} { // each, though the other is lost, too
		ended, err := f.revoke(wallet.Revoke{Wallet: "ann", Reference: reference, Renewals: true})
		require.NoError(t, err)
		require.Zero(t, ended.Amount)
	}
	drawn, err := f.tryDraw(toDraw{Wallet: "ann", Amount: 1})
	require.NoError(t, err)
	require.EqualValues(t, 26, drawn.Left, "the lots of this day began, and none comes after them")
	f.clock.Set(noon.Add(3 * day))
	b, err := f.book.Balance(t.Context(), f.pool, "ann")
	require.NoError(t, err)
	require.LessOrEqual(t, b.Units, int64(7))
	_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
}

// A plan keeps its zones by their present names, where the server knows them and shows the same time by them. A name that
// the server has lost, or does not have yet, is read by the other one.
func TestZone_IsKeptByItsPresentName(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	renames := func(json string) {
		pgtest.Execute(t, f.pool, "create or replace function metered._renamed_zones() returns jsonb language sql immutable as $$ select '"+json+"'::jsonb $$")
	}
	in := func(zone string) budget.Period { return budget.Period{Unit: budget.Day, Zone: zone} }
	kept := func(name string) string {
		return pgtest.Value[string](t, f.pool, "select concat_ws(' ', ((plan).renews).zone, ((plan).roll_to).zone) from metered.lot_rows where scope = $1 order by no desc limit 1", name)
	}
	require.Empty(t, pgtest.Value[string](t, f.pool, `select coalesce(string_agg(x.key, ' '), '') from jsonb_each_text(metered._renamed_zones()) x
		where metered._known_zone(x.key) is distinct from x.value`), "the server of this test knows all names")

	plan := wallet.Grant{Wallet: "ann", Amount: 10, Reference: "plan", Ends: wallet.EachPeriod(in("Asia/Calcutta")), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.ToEndOf(in("US/Michigan"))}}
	f.grant(plan)
	require.Equal(t, "Asia/Kolkata America/Detroit", kept("ann"))
	require.Equal(t, f.grant(plan), f.grant(plan), "the same grant again")

	renames(`{"Asia/Kolkata": "Asia/Nowhere", "Europe/Berlin": "Asia/Tokyo"}`)
	for name, zone := range map[string]string{"older data": "Asia/Kolkata", "other rules": "Europe/Berlin"} {
		f.grant(wallet.Grant{Wallet: name, Amount: 10, Reference: "plan", Ends: wallet.EachPeriod(in(zone))})
		require.Equal(t, zone, kept(name), name)
	}

	renames(`{"Asia/Lost": "Asia/Kolkata", "Europe/Berlin": "Asia/New"}`)
	for name, zone := range map[string]string{"ann": "Asia/Lost", "older data": "Asia/New"} {
		_, err := f.pool.Exec(t.Context(), "update metered.lot_rows set plan.renews.zone = $2 where scope = $1 and ((plan).renews).every is not null", name, zone)
		require.NoError(t, err)
	}
	f.clock.Set(noon.Add(day))
	for _, name := range []string{"ann", "older data"} {
		_, err := f.tryDraw(toDraw{Wallet: name, Amount: 8})
		require.NoError(t, err)
	}
	charge := func(zone string) error {
		_, err := pgtest.InTx(t.Context(), f.pool, func(tx pgx.Tx) (budget.Receipt, error) {
			return f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "s", Amount: 1, Limits: []budget.Limit{{Max: 5, Period: in(zone)}}})
		})
		return err
	}
	verified, err := f.ledger.Verify(t.Context(), f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Len(t, verified.Differences, 2, "the server has lost the names, though calls go on")
	_, err = f.pool.Exec(t.Context(), "update metered.lot_rows set plan.renews.zone = 'UTC' where ((plan).renews).every is not null")
	require.NoError(t, err)
	require.NoError(t, charge("Asia/Lost"))
	require.ErrorIs(t, charge("Asia/Nowhere"), fault.New("budget_time_zone", ""))
}

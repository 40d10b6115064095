package main

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

func TestNearlyOut_LooksAtAllScopes(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(9))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "user/ann", Amount: 600}, budget.Charge{Scope: "user/ben", Amount: 500},
			budget.Charge{Scope: "user/eve", Amount: 400})
		return err
	}))
	clock.Advance(3 * 24 * time.Hour)
	l := as(t, pool, metered.GrantReportingSQL)
	r := l.exits(exitDone, "nearly-out", "user/", "--limit", "user/* 600/30d", "--json")
	require.Equal(t, []any{"user/ann", "user/ben"}, values(r.objects(), "scope"))
	require.Contains(t, l.ok("nearly-out", "--limit", "user/* month=600/30d"), "user/ann  600/30d  600")
	require.Contains(t, l.exits(exitUsage, "nearly-out").err, "give the limits of your program")
}

func TestWallets_AreListedByTheirCredit(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	book := purse(t, pool, c)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "user/ben", Amount: 5})
		return err
	}))
	l := as(t, pool, metered.GrantReportingSQL)
	r := l.exits(exitDone, "wallets", "--json")
	require.Equal(t, []any{"user/ben", "user/ann"}, values(r.objects(), "wallet"))
	require.Equal(t, []any{5.0, 38.0}, values(r.objects(), "units"))
	require.Equal(t, []any{0.0, 8.0}, values(r.objects(), "held"))
	require.Equal(t, "None of 0 scopes is a wallet.\n", l.ok("wallets", "org/none"))
}

// The command line and the page read each other's limits.
func TestLimits_OfThePageAreReadHere(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"0/credit", "prepaid", "credit/0"} {
		limit, err := parseLimit(text)
		require.NoError(t, err)
		require.Equal(t, budget.Prepaid(0), limit, text)
	}
}

// Hours that round up to a day are one.
func TestLasting_HasNoDayOf24Hours(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		3650*24*time.Hour - time.Minute: "3650d", 49 * time.Hour: "2d1h", 47*time.Hour + 59*time.Minute: "47h59m", 90 * time.Second: "1m30s",
	} {
		require.Equal(t, want, lasting(d))
	}
}

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

// Lots of all wallets that end soon, the first to end first.
func TestWallets_AreListedByWhatEndsSoon(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	book := purse(t, pool, c)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for name, lasts := range map[string]time.Duration{"user/cat": 36 * time.Hour, "user/ben": 30 * time.Hour, "user/dan": 900 * time.Hour} {
			if _, err := book.Grant(t.Context(), tx, grantFor(name, lasts)); err != nil {
				return err
			}
		}
		_, err := book.Rollover(t.Context(), tx, wallet.Rollover{Wallet: "user/dan", Reference: "r", Cap: 4, For: 37 * time.Hour})
		return err
	}))
	l := as(t, pool, metered.GrantReportingSQL)
	r := l.exits(exitDone, "wallets", "--ending", "2d", "--json")
	require.Equal(t, []any{"user/ben", "user/cat", "user/dan"}, values(r.objects(), "wallet"))
	require.Equal(t, []any{7.0, 7.0, 4.0}, values(r.objects(), "units"))
	require.Equal(t, []any{"r", "r", "r"}, values(r.objects(), "reference"), "units that rolled over have the reference of their grant")
	require.Equal(t, []any{"user/cat"}, values(l.exits(exitDone, "wallets", "user/c", "--ending", "2d", "--json").objects(), "wallet"))
	require.Contains(t, l.ok("wallets", "--ending", "2d", "-n", "1"), "user/ben")
	require.Equal(t, "No lot with units left ends within 1h.\n", l.ok("wallets", "--ending", "1h"))
	for _, args := range [][]string{{"--ending", "soon"}, {"--ending", "-1h"}, {"--ending", ""}, {"--ending", "1h", "-n", "0"}, {"--ending", "1h", "--plan", "*"}} {
		l.exits(exitUsage, append([]string{"wallets"}, args...)...)
	}
}

// Wallets with a plan, by its name and then by what is left.
func TestWallets_AreListedByPlan(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	pgtest.SetClock(t, pool, time.Date(2031, 3, 10, 9, 0, 0, 0, time.UTC))
	book := purse(t, pool, c)
	month := budget.Per(1, budget.Month, time.UTC, time.Time{}).Period
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for name, g := range map[string]wallet.Grant{
			"user/ben": {Amount: 300, Reference: "pro"}, "user/cat": {Amount: 200, Reference: "pro"}, "org/dan": {Amount: 9, Reference: "free", Category: "trial"},
		} {
			g.Wallet, g.Ends = name, wallet.EachPeriod(month)
			if _, err := book.Grant(t.Context(), tx, g); err != nil {
				return err
			}
		}
		_, err := book.Change(t.Context(), tx, wallet.Change{Wallet: "user/cat", Reference: "cancel", Plan: "pro", AtEnd: true})
		return err
	}))
	l := as(t, pool, metered.GrantReportingSQL)
	r := l.exits(exitDone, "wallets", "--plan", "*", "--json").objects()
	require.Equal(t, []any{"org/dan", "user/cat", "user/ben"}, values(r, "wallet"))
	require.Equal(t, []any{"free", "pro", "pro"}, values(r, "plan"))
	require.Equal(t, []any{9.0, 200.0, 300.0}, values(r, "units"))
	require.Equal(t, []any{"renews", "ends", "renews"}, values(r, "state"))
	require.Regexp(t, `free +org/dan +9 +renews +2031-04-01 00:00:00.000Z +9 +month@UTC +trial\n`, l.ok("wallets", "--plan", "*"))
	table := l.ok("wallets", "user/", "--plan", "pro", "-n", "1")
	require.Regexp(t, `pro +user/cat +200 +ends +2031-04-01 00:00:00.000Z +- +- +-\n`, table)
	require.Contains(t, table, "These are 1 of 2.\n")
	require.Regexp(t, `^None of \d+ scopes has such a plan.\n$`, l.ok("wallets", "--plan", "fre"))
	l.exits(exitUsage, "wallets", "--plan", "")
}

func grantFor(name string, lasts time.Duration) wallet.Grant {
	return wallet.Grant{Wallet: name, Amount: 7, Ends: wallet.After(lasts), Reference: "r"}
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

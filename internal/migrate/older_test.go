package migrate_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// Packages that are used without a Client do not look at the version first. On an older schema a call works, or says that
// the schema is not migrated: its error is never that of Postgres alone.
func TestPackages_SayThatAnOlderSchemaIsNotMigrated(t *testing.T) {
	t.Parallel()
	pool := copyOf(t, &releases[1])
	l, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(l, holds.Config{})
	require.NoError(t, err)
	purses, err := wallet.New(l, wallet.Config{Overdraft: 100})
	require.NoError(t, err)
	store, err := tokens.New(tokens.Config{})
	require.NoError(t, err)
	slices, err := leases.New(pool, l, leases.Config{Rules: []leases.Rule{{Prefix: "leased/", MinSlice: 1}}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = slices.Close(context.Background()) })
	carver, err := leases.NewCarver(l)
	require.NoError(t, err)
	ctx, now := t.Context(), time.Now()
	charge := budget.Charge{Scope: "charged", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1000, time.Hour)}}
	needs := map[string]bool{} // the calls that version 1 has not
	for name, call := range map[string]func(tx pgx.Tx) error{
		"wallet.Grant": func(tx pgx.Tx) error {
			_, err := purses.Grant(ctx, tx, wallet.Grant{Wallet: "w", Amount: 5, Reference: "r", Ends: wallet.At(now.Add(time.Hour))})
			return err
		},
		"wallet.Charge":  func(tx pgx.Tx) error { _, err := l.Charge(ctx, tx, purses.Charge("w", 1)); return err },
		"wallet.Balance": func(tx pgx.Tx) error { _, err := purses.Balance(ctx, tx, "wallet"); return err },
		"wallet.Revoke": func(tx pgx.Tx) error {
			_, err := purses.Revoke(ctx, tx, wallet.Revoke{Wallet: "wallet", Reference: "r"})
			return unless(err, wallet.ErrUnknownLot)
		},
		"wallet.Reinstate": func(tx pgx.Tx) error {
			_, err := purses.Reinstate(ctx, tx, wallet.Revoke{Wallet: "wallet", Reference: "r"})
			return err
		},
		"wallet.Rollover": func(tx pgx.Tx) error {
			_, err := purses.Rollover(ctx, tx, wallet.Rollover{Wallet: "wallet", Reference: "r", Cap: 5, For: time.Hour})
			return unless(err, wallet.ErrUnknownLot)
		},
		"wallet.SetEnd": func(tx pgx.Tx) error {
			_, err := purses.SetEnd(ctx, tx, wallet.LotEnd{Wallet: "wallet", Reference: "r", Expires: now.Add(time.Hour)})
			return err
		},
		"wallet.Expire": func(tx pgx.Tx) error { _, err := purses.Expire(ctx, tx, "wallet"); return err },
		"wallet.Statement": func(tx pgx.Tx) error {
			for _, err := range purses.Statement(ctx, tx, "wallet", budget.EntriesOptions{}) {
				if err != nil {
					return err
				}
			}
			return nil
		},
		"wallet.Sweep":     func(pgx.Tx) error { _, err := purses.Sweep(ctx, pool, wallet.SweepOptions{}); return err },
		"budget.Charge":    func(tx pgx.Tx) error { _, err := l.Charge(ctx, tx, charge); return err },
		"budget.ChargeNow": func(pgx.Tx) error { _, err := l.ChargeNow(ctx, pool, charge); return err },
		"budget.Charge up to": func(tx pgx.Tx) error {
			upTo := charge
			upTo.UpTo = true
			_, err := l.Charge(ctx, tx, upTo)
			return err
		},
		"budget.ChargeEach": func(tx pgx.Tx) error { _, err := l.ChargeEach(ctx, tx, charge, charge); return err },
		"budget.Check":      func(tx pgx.Tx) error { _, err := l.Check(ctx, tx, charge); return err },
		"budget.Credit": func(tx pgx.Tx) error {
			_, err := l.Credit(ctx, tx, budget.Credit{Scope: "charged", Amount: 1})
			return err
		},
		"budget.Usage": func(tx pgx.Tx) error { _, err := l.Usage(ctx, tx, budget.Query{Scope: "charged"}); return err },
		"budget.Series": func(tx pgx.Tx) error {
			_, err := l.Series(ctx, tx, "charged", now.Add(-48*time.Hour), now, budget.Day, time.UTC)
			return err
		},
		"budget.WhatIf": func(tx pgx.Tx) error {
			_, err := l.WhatIf(ctx, tx, budget.PerWindow(1, time.Hour), now.Add(-time.Hour), now, "charged")
			return err
		},
		"budget.Verify": func(pgx.Tx) error { _, err := l.Verify(ctx, pool, budget.VerifyOptions{}); return err },
		"budget.Create": func(tx pgx.Tx) error { _, err := l.Create(ctx, tx, "made"); return err },
		"holds.Place": func(tx pgx.Tx) error {
			_, err := book.Place(ctx, tx, holds.Placement{Lines: []holds.Line{{Scope: "held", Amount: 1}}, TTL: time.Minute})
			return err
		},
		"holds.Place, up to": func(tx pgx.Tx) error {
			_, err := book.Place(ctx, tx, holds.Placement{Lines: []holds.Line{{Scope: "held", Amount: 1}}, TTL: time.Minute, UpTo: true})
			return err
		},
		"holds.Release": func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"none"}})
			return unless(err, holds.ErrUnknown)
		},
		"holds.Capture": func(tx pgx.Tx) error {
			_, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{"none"}, All: true})
			return unless(err, holds.ErrUnknown)
		},
		"holds.Get": func(tx pgx.Tx) error {
			_, err := book.Get(ctx, tx, "", "none", "")
			return unless(err, holds.ErrUnknown)
		},
		"holds.Sweep": func(pgx.Tx) error { _, err := book.Sweep(ctx, pool, holds.SweepOptions{}); return err },
		"tokens.Mint": func(tx pgx.Tx) error {
			_, err := store.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
			return err
		},
		"tokens.RevokeSubject": func(tx pgx.Tx) error { _, err := store.RevokeSubject(ctx, tx, "p", "s"); return err },
		"leases.Allow": func(pgx.Tx) error {
			return slices.Allow(ctx, budget.Charge{Scope: "leased/a", Amount: 1, Limits: charge.Limits})
		},
		"leases.Carve": func(tx pgx.Tx) error {
			_, err := carver.Carve(ctx, tx, leases.Carving{From: charge, Child: "child", TTL: time.Hour})
			return err
		},
	} {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := call(tx); err != nil {
				return err
			}
			return pgx.ErrTxClosed // undone
		})
		if errors.Is(err, budget.ErrNotMigrated) {
			needs[name] = true
			require.Equal(t, "not_migrated", metered.Code(err), name)
			require.False(t, metered.Retryable(err), name)
			continue
		}
		require.Equal(t, pgx.ErrTxClosed, err, name)
		var raw *pgconn.PgError
		require.NotErrorAs(t, err, &raw, name)
	}
	for _, name := range []string{"wallet.Grant", "wallet.Reinstate", "budget.Charge up to"} {
		require.True(t, needs[name], name)
	}
}

// unless is err, or nil if it is of that kind.
func unless(err, kind error) error {
	if errors.Is(err, kind) {
		return nil
	}
	return err
}

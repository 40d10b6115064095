package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

var walletFigures = []figure{
	{"draw_1_lot_vs_charge", "times the cost", atMost(1.6), "a draw from a wallet with one lot, against a charge of prepaid credit of a scope without lots",
		func(ctx context.Context, b *bench) (samples, error) { return b.draws(ctx, oneLot, noLots) }},
	{"draw_4_live_10000_ended_vs_charge", "times the cost", atMost(2.5), "a draw from a wallet with 4 live lots and 10,000 that ended, against the same charge",
		func(ctx context.Context, b *bench) (samples, error) { return b.draws(ctx, manyEnded, noLots) }},
	{"draw_ended_lots_flat", "times the cost", atMost(1.2), "a draw from a wallet with 4 live lots and 10,000 that ended, against one with 4 live lots alone",
		func(ctx context.Context, b *bench) (samples, error) { return b.draws(ctx, manyEnded, noneEnded) }},
}

// The scopes that are compared. Each has credit for as many draws as there may be.
const (
	noLots    = "no lots"
	oneLot    = "1 lot"
	noneEnded = "4 lots"
	manyEnded = "4 lots, many ended"
)

// wallets is a kit with these scopes.
type wallets struct {
	*kit
	book *wallet.Book
}

// wallets are shared by the figures.
func (b *bench) wallets(ctx context.Context) (*wallets, error) {
	return share(b, "wallets", func() (*wallets, error) {
		k, err := b.kit(ctx, options{}, nil)
		if err != nil {
			return nil, err
		}
		b.closers = append(b.closers, k.drop)
		w := &wallets{kit: k}
		if w.book, err = wallet.New(k.client.Budget, wallet.Config{}); err != nil {
			return nil, err
		}
		return w, w.load(ctx, b)
	})
}

// load makes the lots by the calls that users make. Those that end do so within a millisecond: the
// next grant writes it.
func (w *wallets) load(ctx context.Context, b *bench) error {
	const enough = 1 << 40
	ended := b.pick(10_000, 500)
	b.logf("  granting %d lots", ended)
	err := pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		if _, err := w.client.Budget.Credit(ctx, tx, budget.Credit{Scope: noLots, Amount: enough}); err != nil {
			return err
		}
		for name, live := range map[string]int{oneLot: 1, noneEnded: 4, manyEnded: 4} {
			for range live {
				if _, err := w.book.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: enough, Ends: wallet.After(30 * 24 * time.Hour)}); err != nil {
					return err
				}
			}
		}
		for range ended {
			if _, err := w.book.Grant(ctx, tx, wallet.Grant{Wallet: manyEnded, Amount: 10, Ends: wallet.After(time.Millisecond)}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	time.Sleep(time.Second) // until the last one has ended
	if _, err := w.book.Sweep(ctx, w.Pool, wallet.SweepOptions{}); err != nil {
		return err
	}
	balance, err := w.book.Balance(ctx, w.Pool, manyEnded)
	if err == nil && len(balance.Lots) != 4 {
		err = fmt.Errorf("%d lots are left, want 4", len(balance.Lots))
	}
	if err == nil {
		_, err = w.Exec(ctx, "vacuum analyze")
	}
	return err
}

// draws compares a draw of one scope with that of another, each a unit in a transaction of its own.
func (b *bench) draws(ctx context.Context, one, other string) (samples, error) {
	w, err := b.wallets(ctx)
	if err != nil {
		return samples{}, err
	}
	on := func(name string) contender {
		return contender{name: name, site: w.site, op: func(ctx context.Context, _ int) error {
			return w.charge(ctx, w.book.Charge(name, 1))
		}}
	}
	s, err := b.cost(ctx, on(one), on(other))
	return s, errors.Join(err, w.verified(ctx, one))
}

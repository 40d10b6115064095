package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// topUp credits a payment, in a lot without an end. The payment provider repeats its message until it gets an answer:
// a payment's id grants the lot once, and another sum is refused (wallet.ErrConflict).
func (s *service) topUp(ctx context.Context, payment, account string, units int64) (granted wallet.Granted, err error) {
	return s.grant(ctx, wallet.Grant{
		Wallet: scope(account), Amount: units, Category: paid, Reference: payment,
		LateRefunds: wallet.Forever, Note: budget.Note{Correlation: payment, Reason: "payment"},
	})
}

// promote gives an account credit for a time. Later refunds to it lapse.
func (s *service) promote(ctx context.Context, code, account string, units int64, lasts time.Duration) (wallet.Granted, error) {
	return s.grant(ctx, wallet.Grant{
		Wallet: scope(account), Amount: units, Category: promotional, Reference: code, For: lasts,
		LateRefunds: wallet.Lapse, Note: budget.Note{Correlation: code, Reason: "promotion"},
	})
}

func (s *service) grant(ctx context.Context, g wallet.Grant) (granted wallet.Granted, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		granted, err = s.book.Grant(ctx, tx, g)
		return err
	})
	return granted, err
}

// The payment may bounce again, or be announced again.
const debtSQL = `insert into debts (account, payment, units) values ($1, $2, $3) on conflict do nothing`

// bounce takes a payment's unspent units back. The next invoice bills the spent ones.
func (s *service) bounce(ctx context.Context, payment, account string) (revoked wallet.Revoked, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		revoked, err = s.book.Revoke(ctx, tx, wallet.Revoke{
			Wallet: scope(account), Reference: payment, Note: budget.Note{Correlation: payment, Reason: "bounced"},
		})
		if err != nil || revoked.Missing == 0 {
			return err
		}
		_, err = tx.Exec(ctx, debtSQL, account, payment, revoked.Missing)
		return err
	})
	return revoked, err
}

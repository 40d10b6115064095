package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// The names of the release before, for ../names.go.

type placement = holds.Request

func ending(g wallet.Grant, after time.Duration) wallet.Grant {
	g.For = after
	return g
}

func least(r leases.Rule, slice int64) leases.Rule {
	r.Least = slice
	return r
}

func declared(*metered.Command, string, ...any) bool { return false }

func drawn(ctx context.Context, tx pgx.Tx, _ *budget.Ledger, b *wallet.Book, name string, amount int64) (seq int64, err error) {
	d, err := b.Draw(ctx, tx, wallet.Draw{Wallet: name, Amount: amount})
	return d.Seq, err
}

package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// The release before has other names for these: testdata/names.go is compiled into its programs.

type placement = holds.Placement

func ending(g wallet.Grant, after time.Duration) wallet.Grant {
	g.Ends = wallet.After(after)
	return g
}

func quick(r leases.Rule, lasts time.Duration) leases.Rule {
	r.SliceLasts = lasts
	return r
}

func told(l budget.Limit, at ...budget.Threshold) budget.Limit { return l.WithThresholds(at...) }

func drawn(ctx context.Context, tx pgx.Tx, l *budget.Ledger, b *wallet.Book, name string, amount int64) (seq int64, err error) {
	r, err := l.Charge(ctx, tx, b.Charge(name, amount))
	if err == nil {
		seq = r.Entries[0].Seq
	}
	return seq, err
}

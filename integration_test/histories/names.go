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

// The release before has other names for these: testdata/names.go is compiled into its programs.

type placement = holds.Placement

func ending(g wallet.Grant, after time.Duration) wallet.Grant {
	g.Ends = wallet.After(after)
	return g
}

func least(r leases.Rule, slice int64) leases.Rule {
	r.MinSlice = slice
	return r
}

// declared makes a statement one of the command's own, if the release has that.
func declared(cmd *metered.Command, sql string, args ...any) bool {
	cmd.Statements = new(pgx.Batch)
	cmd.Statements.Queue(sql, args...)
	return true
}

func drawn(ctx context.Context, tx pgx.Tx, l *budget.Ledger, b *wallet.Book, name string, amount int64) (seq int64, err error) {
	r, err := l.Charge(ctx, tx, b.Charge(name, amount))
	if err == nil {
		seq = r.Entries[0].Seq
	}
	return seq, err
}

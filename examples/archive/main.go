// Command archive writes the entries of a ledger into files of JSON lines, by day.
//
//	go run ./examples/archive
//	DATABASE_URL=postgres://… go run ./examples/archive -dir DIR
//
// Read archive.go and README.md. main.go archives the database of DATABASE_URL. Without -dir it runs
// on a throwaway database, into a directory that it removes at the end.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
)

func main() {
	dir := flag.String("dir", "", "archive the database of DATABASE_URL into this directory")
	flag.Parse()
	opts := exampledb.Options{}
	if *dir != "" {
		opts.Shared = true
	}
	exampledb.With("archive", opts, func(ctx context.Context, db *exampledb.Database) (err error) {
		ledger, err := budget.New(budget.Config{})
		if err != nil {
			return err
		}
		a := &archive{db: db.Pool, ledger: ledger, dir: *dir}
		if *dir == "" {
			if a.dir, err = os.MkdirTemp("", "archive"); err != nil {
				return err
			}
			defer func() { err = cmp.Or(err, os.RemoveAll(a.dir)) }()
			for _, amount := range []int64{7, 2, 5} {
				if _, err := ledger.ChargeNow(ctx, db.Pool, budget.Charge{Scope: "org/acme", Amount: amount}); err != nil {
					return err
				}
			}
		}
		if err := a.run(ctx); err != nil {
			return err
		}
		last := int64(0)
		for _, f := range a.open {
			last = f.last
		}
		fmt.Printf("closed files: %d, open files: %d, last number: %d\n", len(a.closed), len(a.open), last)
		return nil
	})
}

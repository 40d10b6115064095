package wallet_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// Low credit is reported once, in the transaction of the draw that reaches the level, and again when a grant has come
// in between. Available units include the overdraft. The last draw but one takes all available units.
func ExampleConfig_thresholds() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{
		OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
			fmt.Println(c.Threshold.Name, "at", c.Available)
			return nil // here: enqueue a job through tx
		},
	})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{
		Overdraft:  100,
		Thresholds: []budget.Threshold{{Name: "low", Left: 500}, {Name: "overdrawn", Used: 1}},
	})
	check(err)
	grant := func(amount int64) {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: amount})
			return err
		}))
	}
	draw := func(amount int64) {
		charge := book.Charge("ann", amount)
		charge.UpTo = true
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			r, err := ledger.Charge(ctx, tx, charge)
			if err == nil {
				fmt.Println("drawn", r.Entries[0].Amount, "left", r.Entries[0].Standings[0].Available)
			}
			return err
		}))
	}
	grant(1000)
	draw(600)
	draw(5)
	draw(900)
	grant(1000)
	draw(600)
	// Output:
	// low at 500
	// drawn 600 left 500
	// drawn 5 left 495
	// overdrawn at 0
	// drawn 495 left 0
	// low at 400
	// drawn 600 left 400
}

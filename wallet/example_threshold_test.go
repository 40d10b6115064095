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
	draw := func(d wallet.Draw) {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			drawn, err := book.Draw(ctx, tx, d)
			fmt.Println("drawn", drawn.Amount, "balance", drawn.Left)
			return err
		}))
	}
	grant(1000)
	draw(wallet.Draw{Wallet: "ann", Amount: 600})
	draw(wallet.Draw{Wallet: "ann", Amount: 5})
	draw(wallet.Draw{Wallet: "ann", Amount: 900, UpTo: true})
	grant(1000)
	draw(wallet.Draw{Wallet: "ann", Amount: 600})
	// Output:
	// low at 500
	// drawn 600 balance 400
	// drawn 5 balance 395
	// overdrawn at 0
	// drawn 495 balance -100
	// low at 400
	// drawn 600 balance 300
}

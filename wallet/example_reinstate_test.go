package wallet_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A payment is disputed, and its credit is taken back. The dispute is won, and the credit comes back under its name.
func ExampleBook_Reinstate() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	payment := wallet.Revoke{Wallet: "ann", Reference: "payment 17"}

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 500, Reference: payment.Reference}); err != nil {
			return err
		}
		taken, err := book.Revoke(ctx, tx, payment)
		if err != nil {
			return err
		}
		back, err := book.Reinstate(ctx, tx, payment)
		fmt.Println("taken", taken.Amount, "back", back.Amount)
		return err
	}))
	b, err := book.Balance(ctx, pool, "ann")
	check(err)
	fmt.Println(b.Units, "units of", b.Lots[0].Reference)
	// Output:
	// taken 500 back 500
	// 500 units of payment 17
}

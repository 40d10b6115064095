package metered_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A report costs 30 units of prepaid credit, which the command declares, and the units that its function adds. The
// same command, sent again, returns the draws of the first run.
func ExampleTx_Draw() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	book, err := wallet.New(client.Budget, wallet.Config{Priorities: map[string]int{"promotional": 5, "paid": 10}})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for category, amount := range map[string]int64{"promotional": 25, "paid": 13} {
			if _, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: amount, Category: category, For: 30 * 24 * time.Hour}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}

	command := metered.Command{ID: "report/17", Input: "2026-11", Charges: []budget.Charge{
		book.Charge("ann", 30, budget.Per(100, budget.Month, time.UTC, time.Time{})), // and the plan's cap of the month
	}}
	write := func(ctx context.Context, tx *metered.Tx) (string, error) {
		// Draws come before the charges of the command: its declared units must be left.
		return "report", tx.Draw(book, wallet.Draw{Wallet: "ann", Amount: 8})
	}
	for range 2 {
		out, err := metered.Do(ctx, client, command, write)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(out.Replayed, out.Receipt.Entries[0].Amount)
		for _, d := range out.Draws {
			fmt.Println(d.Amount, d.Lots[0].Category, d.Left)
		}
	}
	// Output:
	// false 30
	// 8 promotional 30
	// true 30
	// 8 promotional 30
}

package budget_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// A batch job takes what each level still admits, and each level pays the same.
func ExampleLedger_Charge_upTo() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	level := func(scope string, amount, most int64) budget.Charge {
		return budget.Charge{Scope: scope, Amount: amount, UpTo: true, Limits: []budget.Limit{budget.PerWindow(most, time.Hour)}}
	}
	take := func(pages int64) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			receipt, err := ledger.Charge(ctx, tx,
				level("key/7", pages, 50), level("user/ann", pages, 30), level("team/blue", pages, 100), level("org/acme", pages, 40))
			if err != nil {
				return err
			}
			fmt.Println(receipt.Entries[0].Amount, "of", pages, "pages")
			for _, e := range receipt.Entries {
				fmt.Println(e.Scope, "paid", e.Amount, "and has", e.Standings[0].Available)
			}
			return nil
		})
		var exceeded *budget.ExceededError
		if errors.As(err, &exceeded) {
			fmt.Println("nothing:", exceeded.Refusals[0].Scope, "has", exceeded.Refusals[0].Available)
		} else {
			check(err)
		}
	}
	take(60)
	take(60)
	// Output:
	// 30 of 60 pages
	// key/7 paid 30 and has 20
	// user/ann paid 30 and has 0
	// team/blue paid 30 and has 70
	// org/acme paid 30 and has 10
	// nothing: user/ann has 0
}

package wallet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A plan with credit for each month: the first draw of a month grants it. The month in which it was bought has a part
// of it.
func Example_period() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	plan := budget.Per(3000, budget.Month, time.UTC, time.Time{}) // units, and the month in which they come

	// credit is that of a period: from bought on.
	credit := func(start, end, bought time.Time) int64 {
		if bought.Before(start) {
			return plan.Max
		}
		return plan.Max * int64(end.Sub(bought)/time.Second) / int64(end.Sub(start)/time.Second)
	}
	draw := func(bought time.Time, amount int64) (drawn wallet.Drawn, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			now, err := ledger.Usage(ctx, tx, budget.Query{Scope: "ann", Period: plan.Period}) // by the database's clock
			if err != nil {
				return err
			}
			start, end := now[0].PeriodStart, now[0].PeriodEnd
			_, err = book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: credit(start, end, bought), Expires: end,
				Reference: "plan " + start.Format(time.RFC3339)})
			if err != nil {
				return err
			}
			drawn, err = book.Draw(ctx, tx, wallet.Draw{Wallet: "ann", Amount: amount})
			return err
		})
		return drawn, err
	}
	for range 2 { // the second one finds the month's credit
		drawn, err := draw(time.Date(2026, 1, 16, 0, 0, 0, 0, time.UTC), 30)
		check(err)
		fmt.Println("left:", drawn.Left)
	}

	// A plan is bought in the middle of April: its credit for April, computed before anything is granted.
	bought := time.Date(2026, 4, 16, 0, 0, 0, 0, time.UTC)
	start, end, err := plan.Period.At(bought)
	check(err)
	fmt.Println("the first month:", credit(start, end, bought))
	// Output:
	// left: 2970
	// left: 2940
	// the first month: 1500
}

package budget_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Would it fit, and if not, when? Check asks without charging, of limits of every kind: calendar weeks and years,
// periods of 30 days from the purchase on, and a line of credit.
func ExampleLedger_Check() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	since := time.Date(2026, 3, 2, 12, 0, 0, 0, berlin)
	pool, setClock, done := exampleDatabaseAt(since)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	charge := budget.Charge{Scope: "org/acme", Amount: 400, Limits: []budget.Limit{
		budget.Per(700, budget.Week, berlin, time.Time{}).Named("week"),
		budget.Per(10_000, budget.Year, berlin, time.Time{}).Named("year"),
		budget.PerPeriod(1_000, 30*24*time.Hour, since).Named("30 days"),
		budget.Prepaid(900).Named("owed"),
	}}
	setClock(since.AddDate(0, 0, 2)) // a Wednesday
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		receipt, err := ledger.Charge(ctx, tx, charge)
		if err != nil {
			return err
		}
		for _, s := range receipt.Entries[0].Standings {
			fmt.Print(s.Limit.Name, ": ", s.Available, " left")
			if !s.Limit.Period.IsZero() {
				fmt.Print(" until ", s.PeriodEnd.In(berlin).Format("Monday, 2 January 15:04"))
			}
			fmt.Println()
		}
		return nil
	}))
	_, err = ledger.Check(ctx, pool, charge)
	var refused *budget.ExceededError
	if !errors.As(err, &refused) {
		check(err)
	}
	fmt.Println(refused.Refusals[0].Limit.Name, "refuses, try again in", refused.RetryAfter())
	// Output:
	// week: 300 left until Monday, 9 March 00:00
	// year: 9600 left until Friday, 1 January 00:00
	// 30 days: 600 left until Wednesday, 1 April 13:00
	// owed: 500 left
	// week refuses, try again in 108h0m0s
}

package budget_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// A plan of 1,000 units a month, from the day of the subscription on, in the customer's time zone. It was taken out on the 31st,
// so shorter months begin on their last day.
func ExamplePer() {
	ctx := context.Background()
	zone, err := time.LoadLocation("Europe/Berlin")
	check(err)
	since := time.Date(2026, 1, 31, 0, 0, 0, 0, zone)
	pool, _, done := exampleDatabaseAt(since.AddDate(0, 0, 10))
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)

	spend := func(amount int64, plan budget.Limit) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			receipt, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: amount, Limits: []budget.Limit{plan}})
			if err == nil {
				s := receipt.Entries[0].Standings[0]
				fmt.Printf("%s: %d left, until midnight in Berlin: %v\n", s.Limit.Name, s.Available, s.PeriodEnd.In(zone).Hour() == 0)
			}
			return err
		})
		var refused *budget.ExceededError
		if errors.As(err, &refused) {
			r := refused.Refusals[0]
			fmt.Printf("%s: refused, next month it fits: %v\n", r.Limit.Name, r.RetryAfter > 0 && r.RetryAfter < r.PeriodEnd.Sub(r.PeriodStart))
		} else {
			check(err)
		}
	}
	small := budget.Per(1_000, budget.Month, zone, since).Named("small")
	spend(700, small)
	spend(700, small)
	// A larger plan in mid-month: used units stay used.
	spend(700, budget.Per(5_000, budget.Month, zone, since).Named("large"))
	// Output:
	// small: 300 left, until midnight in Berlin: true
	// small: refused, next month it fits: true
	// large: 3600 left, until midnight in Berlin: true
}

// A quarter, and half a year from the day of a contract on.
func ExampleEvery() {
	day := time.Date(2026, time.November, 25, 12, 0, 0, 0, time.UTC)
	contract := time.Date(2025, time.August, 31, 0, 0, 0, 0, time.UTC)
	for _, limit := range []budget.Limit{
		budget.Per(30_000, budget.Every(3, budget.Month), time.UTC, time.Time{}),
		budget.Per(60_000, budget.Every(6, budget.Month), time.UTC, contract),
	} {
		start, end, err := limit.Period.At(day)
		check(err)
		fmt.Println(limit.Period.Unit, start.Format(time.DateOnly), end.Format(time.DateOnly))
	}
	// Output:
	// 3 months 2026-10-01 2027-01-01
	// 6 months 2026-08-31 2027-02-28
}

package budget_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// The invoice of a month by day, by the clock of the customer's city. It is written when the month is over: under
// the scope's lock, no charge of the month is still missing.
func ExampleLedger_Series() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	march := func(day, hour int) time.Time { return time.Date(2026, 3, day, hour, 0, 0, 0, berlin) }
	pool, setClock, done := exampleDatabaseAt(march(1, 0))
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	charge := func(at time.Time, amount int64) {
		setClock(at)
		_, err := ledger.ChargeNow(ctx, pool, budget.Charge{Scope: "org/acme", Amount: amount})
		check(err)
	}
	charge(march(1, 0), 100)
	charge(march(29, 0).Add(-time.Microsecond), 70)
	charge(march(29, 3), 30) // a day of 23 hours
	setClock(march(31, 12))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := ledger.Refund(ctx, tx, budget.Refund{Scope: "org/acme", Seq: 2, Amount: 20})
		return err
	}))
	charge(march(32, 0), 500) // in April

	var total int64
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := ledger.Lock(ctx, tx, "org/acme"); err != nil {
			return err
		}
		days, err := ledger.Series(ctx, tx, "org/acme", march(1, 0), march(32, 0), budget.Day, berlin)
		for _, day := range days {
			if total += day.Billed(); day.Charged > 0 || day.RefundsMade > 0 {
				fmt.Printf("%s, %v: %d charged (%d of it refunded by now), %d given back\n",
					day.From.Format(time.DateOnly), day.To.Sub(day.From), day.Charged, day.RefundedOfCharged, day.RefundsMade)
			}
		}
		return err
	}))
	fmt.Println("to pay:", total)
	// Output:
	// 2026-03-01, 24h0m0s: 100 charged (0 of it refunded by now), 0 given back
	// 2026-03-28, 24h0m0s: 70 charged (20 of it refunded by now), 0 given back
	// 2026-03-29, 23h0m0s: 30 charged (0 of it refunded by now), 0 given back
	// 2026-03-31, 24h0m0s: 0 charged (0 of it refunded by now), 20 given back
	// to pay: 180
}

package holds_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// Estimates are larger than the real costs: with Spent, "80 % used" is reported by the capture that reaches it, and not
// by the hold.
func ExampleBook_Capture_threshold() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{
		OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error { // a job or a row, by the transaction
			_, err := fmt.Println(c.Threshold.Name, "of", c.Scope, "with", c.Used)
			return err
		},
	})
	check(err)
	book, err := holds.New(ledger, holds.Config{})
	check(err)
	plan := budget.Lifetime(1_000).WithThresholds(budget.Threshold{Name: "80 %", Percent: 80, Spent: true})

	for _, work := range []struct{ estimate, used int64 }{{900, 700}, {300, 150}} {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			line := holds.Line{Scope: "org/acme", Amount: work.estimate, Limits: []budget.Limit{plan}}
			h, err := book.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{line}})
			if err != nil {
				return err
			}
			fmt.Println("held", work.estimate)
			line.Amount = work.used
			_, err = book.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{line}})
			return err
		}))
	}
	// Output:
	// held 900
	// held 300
	// 80 % of org/acme with 850
}

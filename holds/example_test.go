package holds_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// Two seats are held for five minutes, while somebody types a card number, and then
// sold.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	hold := func(holder string, seats int64) (h holds.Hold, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			h, err = book.Place(ctx, tx, holds.Request{
				Holder: holder,
				TTL:    5 * time.Minute,
				Lines: []holds.Line{{
					Scope: budget.ScopeKey("seats", "hall 1", "2026-11-21T20:00"), Amount: seats,
					Limits: []budget.Limit{budget.Lifetime(3)}, // a capacity
				}},
			})
			return err
		})
		return h, err
	}

	ann, err := hold("ann", 2)
	check(err)
	fmt.Println(ann.State, "for", ann.Remaining())

	_, err = hold("ben", 2)
	var exceeded *budget.ExceededError
	if errors.As(err, &exceeded) {
		r := exceeded.Refusals[0]
		fmt.Printf("requested %d, available %d of %d, the next hold ends within 5m: %v\n",
			r.Requested, r.Available, r.Limit.Max, r.HoldDue <= 5*time.Minute)
	}

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// … the application's own order, in the same transaction …
		sold, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{ann.ID}, All: true, Holder: "ann", Entity: "order/7"})
		if err == nil {
			fmt.Println(sold[0].State, sold[0].Lines[0].Captured, "for", sold[0].Entity)
		}
		return err
	}))
	// Output:
	// held for 5m0s
	// requested 2, available 1 of 3, the next hold ends within 5m: true
	// captured 2 for order/7
}

// An estimate is held, what was really used is captured as it comes, and the rest is
// free again.
func ExampleBook_Capture() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	var job holds.Hold
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		job, err = book.Place(ctx, tx, holds.Request{
			ID: "job-1", TTL: time.Hour,
			Lines: []holds.Line{{Scope: "gpu/acme", Amount: 100, Limits: []budget.Limit{budget.PerWindow(1_000, 24*time.Hour)}}},
		})
		return err
	}))
	used := func(seconds int64, keep bool, over holds.Over) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			hs, err := book.Capture(ctx, tx, holds.Capture{
				IDs: []string{job.ID}, Lines: []holds.Line{{Scope: "gpu/acme", Amount: seconds}}, Keep: keep, Over: over,
			})
			if err == nil {
				line := hs[0].Lines[0]
				fmt.Printf("%s: %d used, %d held\n", hs[0].State, line.Captured, line.Open)
			}
			return err
		})
		if err != nil {
			fmt.Println(err)
		}
	}
	used(30, true, holds.OverRefused)
	used(40, true, holds.OverRefused)
	used(45, false, holds.OverRefused)
	used(45, false, holds.OverAllowed) // it was used, so it is charged
	used(1, false, holds.OverRefused)
	// Output:
	// held: 30 used, 70 held
	// held: 70 used, 30 held
	// holds: the capture exceeds what is held: scope "gpu/acme": requested 45, held 30
	// captured: 115 used, 0 held
	// holds: the hold was captured: "job-1"
}

func exampleBook(cfg holds.Config) *holds.Book {
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := holds.New(ledger, cfg)
	check(err)
	return book
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

package maintain_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/maintain"
)

// One call ends the hold whose time is over, and deletes entries of last year. A report says what it did, and which
// steps the policy leaves out.
func ExampleRun() {
	ctx := context.Background()
	start := time.Date(2026, 1, 1, 9, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(start)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := holds.New(ledger, holds.Config{}) // with the application's Subscribers
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for range 100 {
			if _, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 1}); err != nil {
				return err
			}
		}
		_, err := book.Place(ctx, tx, holds.Placement{ID: "h1", TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		return err
	}))
	setClock(start.AddDate(0, 0, 401))

	report, err := maintain.Run(ctx, pool, maintain.Parts{Ledger: ledger, Holds: book}, maintain.Policy{
		Entries: 400 * 24 * time.Hour, Holds: 500 * 24 * time.Hour,
	})
	check(err)
	for _, s := range report.Steps {
		if s.Off != "" {
			fmt.Println(s.Name+":", "left out,", s.Off)
		} else {
			fmt.Println(s.Name+":", s.Done)
		}
	}
	// Output:
	// sweep holds: 1
	// sweep leases: 0
	// sweep lots: left out, Parts.Wallets is nil
	// purge holds: 0
	// purge leases: 0
	// purge tokens: 0
	// purge operations: left out, Policy.Operations is not set
	// purge job keys: left out, Policy.JobKeys is not set
	// purge entries: 95
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

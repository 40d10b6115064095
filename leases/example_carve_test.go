package leases_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

// An agent's run gets part of its user's budget, and gives part of that to a step. What a step does not use is free for the
// run again, and what the run does not use for the user.
func ExampleCarver_Carve() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	carver, err := leases.NewCarver(ledger)
	if err != nil {
		log.Fatal(err)
	}
	daily := []budget.Limit{budget.PerWindow(1_000, 24*time.Hour)}
	prepaid := []budget.Limit{budget.Prepaid()}

	// In a program each of these steps is a transaction of its own, with the writes that belong to it.
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := carver.Carve(ctx, tx, leases.Carving{
			Child: "run/42", TTL: time.Hour, // a run that crashes is closed then, by Carver.Sweep or a Pool
			From: budget.Charge{Scope: "user/ann", Amount: 500, Limits: daily},
		})
		if err != nil {
			return err
		}
		_, err = carver.Carve(ctx, tx, leases.Carving{
			Child: "run/42/step/1", TTL: time.Minute, From: budget.Charge{Scope: "run/42", Amount: 200, Limits: prepaid},
		})
		if err != nil {
			return err
		}
		if _, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "run/42/step/1", Amount: 120, Limits: prepaid}); err != nil {
			return err
		}
		_, err = ledger.Charge(ctx, tx, budget.Charge{Scope: "run/42/step/1", Amount: 81, Limits: prepaid})
		fmt.Println("more than the step has:", errors.Is(err, budget.ErrExceeded))

		for _, child := range []string{"run/42/step/1", "run/42"} {
			lease, err := carver.Close(ctx, tx, child, budget.Note{})
			if err != nil {
				return err
			}
			fmt.Printf("%s used %d of %d\n", child, lease.Spent, lease.Granted)
		}
		_, err = ledger.Charge(ctx, tx, budget.Charge{Scope: "run/42", Amount: 1})
		fmt.Println("after the end:", errors.Is(err, budget.ErrScopeClosed))
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: "user/ann", Window: 24 * time.Hour})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the user has", usage[0].Available(1_000), "left")
	// Output:
	// more than the step has: true
	// run/42/step/1 used 120 of 200
	// run/42 used 120 of 500
	// after the end: true
	// the user has 880 left
}

package leases_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

// A hot budget is spent from leases, inside transactions of the caller's.
func ExamplePool_Charge() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	pool, err := leases.New(db, leases.Config{Rules: []leases.Rule{{Prefix: "org/"}}})
	if err != nil {
		log.Fatal(err)
	}
	acme := budget.Charge{Scope: "org/acme", Amount: 5, Limits: []budget.Limit{budget.PerWindow(100_000, time.Hour)}}
	for range 1000 {
		err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			// … your own writes …
			_, err := pool.Charge(ctx, tx, acme)
			return err
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	if err := pool.Close(ctx); err != nil { // gives back what is not spent
		log.Fatal(err)
	}
	ledger, _ := budget.New(budget.Config{})
	usage, err := ledger.Usage(ctx, db, budget.Query{Scope: "org/acme", Window: time.Hour})
	fmt.Println(usage[0].Used, usage[0].Held, usage[0].Leased, err)
	// Output: 5000 0 0 <nil>
}

// A limit on something that writes nothing is decided from memory.
func ExamplePool_Allow() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	pool, err := leases.New(db, leases.Config{Rules: []leases.Rule{{Prefix: "search/"}}})
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close(ctx)
	search := budget.Charge{Scope: "search/203.0.113.7", Amount: 1, Limits: []budget.Limit{budget.PerWindow(3, time.Minute)}}
	for range 4 {
		fmt.Println(pool.Allow(ctx, search) == nil)
	}
	// Output:
	// true
	// true
	// true
	// false
}

package budget_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Another plan on last month's history: who would have been refused, since when, and how much would have been left?
func ExampleLedger_WhatIf() {
	ctx := context.Background()
	march := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(march)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	for day := range 31 {
		setClock(march.AddDate(0, 0, day).Add(9 * time.Hour))
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx,
				budget.Charge{Scope: "calls/acme", Amount: 30}, budget.Charge{Scope: "calls/umbrella", Amount: 20 + 2*int64(day)})
			return err
		}))
	}
	for _, plan := range []budget.Limit{
		budget.Per(1_000, budget.Month, time.UTC, time.Time{}).Named("1,000 a month"),
		budget.PerWindow(250, 7*24*time.Hour).Named("250 in any 7 days"),
	} {
		trials, err := ledger.WhatIf(ctx, pool, plan, march, march.AddDate(0, 1, 0), "calls/acme", "calls/umbrella")
		check(err)
		for _, t := range trials {
			fmt.Printf("%s: %s used up to %d, left %d", t.Limit.Name, t.Scope, t.Used, t.Available)
			if !t.RefusedAt.IsZero() {
				fmt.Printf(", refused from %s on", t.RefusedAt.Format("2 January 15:04"))
			}
			fmt.Println()
		}
	}
	// Output:
	// 1,000 a month: calls/acme used up to 930, left 70
	// 1,000 a month: calls/umbrella used up to 1550, left 0, refused from 24 March 09:00 on
	// 250 in any 7 days: calls/acme used up to 210, left 40
	// 250 in any 7 days: calls/umbrella used up to 518, left 0, refused from 12 March 09:00 on
}

// A limit that is tried on live traffic judges each charge, and lets it through. A threshold reports each customer once.
func Example_observe() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{
		OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
			fmt.Println(c.Scope, "goes beyond", c.Limit.Name)
			return nil
		},
	})
	check(err)
	tried := budget.PerWindow(100, 24*time.Hour).Named("100 a day").WithThresholds(budget.Threshold{Name: "beyond", Used: 101})
	tried.Observe = true
	for range 3 {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			receipt, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "calls/acme", Amount: 50, Limits: []budget.Limit{tried}})
			if err == nil {
				fmt.Println("would have been refused:", receipt.Entries[0].Standings[0].Over)
			}
			return err
		}))
	}
	// Output:
	// would have been refused: false
	// would have been refused: false
	// calls/acme goes beyond 100 a day
	// would have been refused: true
}

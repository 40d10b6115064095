package budget_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Each entry becomes one line of a bill, whatever fails in between: the line and the place in the
// feed are committed together.
func ExampleLedger_RunFeed() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	_, err = pool.Exec(ctx, "create table lines (customer text, units bigint, number bigint primary key)")
	check(err)
	for _, charge := range []budget.Charge{{Scope: "org/acme", Amount: 7}, {Scope: "org/zeta", Amount: 2}, {Scope: "org/acme", Amount: 5}} {
		_, err = ledger.ChargeNow(ctx, pool, charge)
		check(err)
	}

	check(ledger.RunFeed(ctx, pool, "bill", budget.FeedOptions{},
		func(ctx context.Context, tx pgx.Tx, entries []budget.FeedEntry) error {
			for _, e := range entries {
				if e.Kind != budget.EntryCharge {
					continue
				}
				_, err := tx.Exec(ctx, "insert into lines values ($1, $2, $3)", e.Scope, e.Amount, e.Number)
				if err != nil {
					return err
				}
				fmt.Println(e.Scope, e.Amount)
			}
			return nil
		}))
	// Output:
	// org/acme 7
	// org/acme 5
	// org/zeta 2
}

// A reader that keeps its place somewhere else, and one whose place is a row of the database.
func ExampleLedger_Feed() {
	ctx := context.Background()
	pool, setClock, done := exampleDatabaseAt(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	_, err = ledger.ChargeNow(ctx, pool, budget.Charge{Scope: "org/acme", Amount: 7})
	check(err)

	var place budget.FeedCursor // of the last time
	for e, err := range ledger.Feed(ctx, pool, place, budget.FeedOptions{}) {
		check(err)
		fmt.Println(e.Number, e.Scope, e.Seq, e.Kind, e.Amount)
		place = e.Cursor
	}

	setClock(time.Date(2026, 3, 1, 12, 5, 0, 0, time.UTC))
	_, err = ledger.ChargeNow(ctx, pool, budget.Charge{Scope: "org/acme", Amount: 2})
	check(err)
	_, err = ledger.NumberFeed(ctx, pool)
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		entries, err := ledger.ConsumeFeed(ctx, tx, "archive", budget.FeedOptions{Max: 1})
		if err == nil {
			fmt.Println("archived:", entries[0].Number)
		}
		return err
	}))
	consumers, err := ledger.FeedConsumers(ctx, pool)
	check(err)
	for _, c := range consumers {
		fmt.Println(c.Name, "has", c.Unread, "to read, since", c.UnreadSince.Format(time.TimeOnly))
	}
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := ledger.DropFeedConsumer(ctx, tx, "archive")
		return err
	}))
	// Output:
	// 1 org/acme 1 charge 7
	// archived: 1
	// archive has 1 to read, since 12:05:00
}

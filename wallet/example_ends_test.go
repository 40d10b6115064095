package wallet_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A customer leaves the monthly plan: half of the units left of the month stay for a year. Asked for again, it is the
// same lot.
func ExampleBook_Rollover() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	book, err := wallet.New(ledger, wallet.Config{})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 100, Ends: wallet.After(30 * 24 * time.Hour), Reference: "november"}); err != nil {
			return err
		}
		for range 2 {
			rolled, err := book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: "november", Cap: 50, For: 365 * 24 * time.Hour})
			if err != nil {
				return err
			}
			fmt.Println(rolled.Amount, rolled.Replayed)
		}
		balance, err := book.Balance(ctx, tx, "ann")
		fmt.Println(balance.Units, "of them", balance.Expiring(time.Now().Add(60*24*time.Hour)), "for a month")
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// 50 false
	// 50 true
	// 100 of them 50 for a month
}

// A charge of several scopes takes credit of a wallet and counts against a rate, or neither. A job for the lot's end
// writes the lapse. Here it comes too early, and does nothing.
func ExampleBook_Expire() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	book, err := wallet.New(ledger, wallet.Config{})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 10, Ends: wallet.After(time.Hour)}); err != nil {
			return err
		}
		_, err := ledger.Charge(ctx, tx, book.Charge("ann", 4), budget.Charge{Scope: "ann/requests", Amount: 1, Limits: []budget.Limit{budget.PerWindow(60, time.Minute)}})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		report, err := book.Expire(ctx, tx, "ann")
		fmt.Println("ended:", report.Ended)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	balance, err := book.Balance(ctx, pool, "ann")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("left:", balance.Units)
	// Output:
	// ended: 0
	// left: 6
}

package wallet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A plan of 300 units a month is changed by the messages of a payment provider: to a larger one in the middle of November, to a
// smaller one from December on. That is taken back, and then the plan is cancelled.
func ExampleBook_Change() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	november := time.Date(2026, time.November, 1, 0, 0, 0, 0, berlin)
	pool, setClock, done := exampleDatabaseAt(november)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	month := budget.Per(300, budget.Month, berlin, time.Time{}).Period
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 300, Reference: "small", Ends: wallet.EachPeriod(month)})
		return err
	}))

	setClock(november.AddDate(0, 0, 15))
	large := wallet.Grant{Amount: 900, Reference: "large", Ends: wallet.EachPeriodProrated(month)}
	tiny := wallet.Grant{Amount: 100, Reference: "tiny", Ends: wallet.EachPeriod(month)}
	for _, change := range []wallet.Change{
		{Wallet: "ann", Reference: "evt_1", Plan: "small", To: &large, Carry: true},
		{Wallet: "ann", Reference: "evt_1", Plan: "small", To: &large, Carry: true}, // delivered again
		{Wallet: "ann", Reference: "evt_2", Plan: "large", To: &tiny, AtEnd: true},
		{Wallet: "ann", Reference: "evt_3", Plan: "large", Resume: true},
		{Wallet: "ann", Reference: "evt_4", Plan: "large", AtEnd: true},
	} {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			changed, err := book.Change(ctx, tx, change)
			fmt.Println(changed)
			return err
		}))
	}
	b, err := book.Balance(ctx, pool, "ann")
	check(err)
	fmt.Println(b.Units, "units")
	// Output:
	// large after small from 2026-11-15T23:00:00Z, with 300 until 2026-11-30T23:00:00Z
	// large after small from 2026-11-15T23:00:00Z, with 300 until 2026-11-30T23:00:00Z (before)
	// tiny after large from 2026-11-30T23:00:00Z, with 100 until 2026-12-31T23:00:00Z
	// large renews, in place of evt_2
	// large ends at 2026-11-30T23:00:00Z
	// 600 units
}

// A plan may be overdrawn by up to 100 units. What was overdrawn in November is on its invoice, and is forgiven.
func ExampleBook_Overage() {
	ctx := context.Background()
	november := time.Date(2026, time.November, 1, 0, 0, 0, 0, time.UTC)
	december := november.AddDate(0, 1, 0)
	pool, setClock, done := exampleDatabaseAt(november)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{Overdraft: 100})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		month := budget.Per(300, budget.Month, time.UTC, time.Time{}).Period
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 300, Reference: "plan", Ends: wallet.EachPeriod(month)})
		if err == nil {
			_, err = ledger.Charge(ctx, tx, book.Charge("ann", 380))
		}
		return err
	}))

	setClock(december)
	b, err := book.Balance(ctx, pool, "ann")
	check(err)
	fmt.Println(b.Units, "units in December")
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		over, err := book.Overage(ctx, tx, wallet.Overage{Wallet: "ann", Plan: "plan", At: december, Forgive: true})
		fmt.Println(over.Amount, "units for November's invoice") // a row of yours, in the same transaction
		return err
	}))
	b, err = book.Balance(ctx, pool, "ann")
	check(err)
	fmt.Println(b.Units, "units in December")
	// Output:
	// 220 units in December
	// 80 units for November's invoice
	// 300 units in December
}

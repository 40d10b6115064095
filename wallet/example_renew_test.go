package wallet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A customer buys 300 units a month in the middle of November, for a part of the price. Each month brings its lot at its first moment,
// though nothing runs then. Units that are left go on for a month at a time, 150 of them in all. The plan is cancelled in January.
func ExampleBook_Grant_renews() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	bought := time.Date(2026, time.November, 16, 0, 0, 0, 0, berlin)
	pool, setClock, done := exampleDatabaseAt(bought)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)

	month := budget.Per(300, budget.Month, berlin, time.Time{}).Period
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Grant(ctx, tx, wallet.Grant{
			Wallet: "ann", Amount: 300, Category: "included", Reference: "subscription 17", Ends: wallet.EachPeriodProrated(month), Starts: bought,
			Roll: &wallet.Roll{Cap: 150, Lasts: wallet.ToEndOf(month), Times: -1, Shared: true},
		})
		return err
	})
	check(err)
	show := func(at time.Time) {
		setClock(at)
		b, err := book.Balance(ctx, pool, "ann")
		check(err)
		fmt.Println(at.In(berlin).Format("2 Jan 15:04:05"), b.Units, "units")
	}
	show(bought)
	show(time.Date(2026, time.November, 30, 23, 59, 59, 0, berlin))
	show(time.Date(2026, time.December, 1, 0, 0, 0, 0, berlin))
	show(time.Date(2027, time.January, 1, 0, 0, 0, 0, berlin))

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: "subscription 17", Renewals: true})
		return err
	})
	check(err)
	show(time.Date(2027, time.February, 1, 0, 0, 0, 0, berlin))
	show(time.Date(2027, time.March, 1, 0, 0, 0, 0, berlin))
	// Output:
	// 16 Nov 00:00:00 150 units
	// 30 Nov 23:59:59 150 units
	// 1 Dec 00:00:00 450 units
	// 1 Jan 00:00:00 450 units
	// 1 Feb 00:00:00 150 units
	// 1 Mar 00:00:00 150 units
}

// A voucher that was sold for January can be used a month longer.
func ExampleBook_SetEnd() {
	ctx := context.Background()
	january := time.Date(2027, time.January, 1, 0, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(january.AddDate(0, 0, -7))
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ben", Amount: 40, Reference: "voucher", Starts: january, Ends: wallet.At(january.AddDate(0, 1, 0))})
		if err != nil {
			return err
		}
		end := wallet.LotEnd{Wallet: "ben", Reference: "voucher", Expires: january.AddDate(0, 2, 0), Note: budget.Note{Reason: "closed for repairs"}}
		_, err = book.SetEnd(ctx, tx, end)
		return err
	})
	check(err)
	for _, at := range []time.Time{january.Add(-time.Microsecond), january, january.AddDate(0, 2, 0).Add(-time.Microsecond), january.AddDate(0, 2, 0)} {
		setClock(at)
		b, err := book.Balance(ctx, pool, "ben")
		check(err)
		fmt.Println(at.Format("2 Jan 15:04:05"), b.Units, "units")
	}
	// Output:
	// 31 Dec 23:59:59 0 units
	// 1 Jan 00:00:00 40 units
	// 28 Feb 23:59:59 40 units
	// 1 Mar 00:00:00 0 units
}

// The first week of a plan is a trial with 20 units. Each week after it has 100.
func ExampleEachPeriodWithFirst() {
	ctx := context.Background()
	monday := time.Date(2027, time.January, 4, 0, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(monday)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	week := budget.Per(100, budget.Week, time.UTC, time.Time{}).Period
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		g := wallet.Grant{Wallet: "eve", Amount: 100, Reference: "plan", Ends: wallet.EachPeriodWithFirst(week, 20)}
		_, err := book.Grant(ctx, tx, g)
		return err
	}))
	for n := range 3 {
		setClock(monday.AddDate(0, 0, 7*n))
		b, err := book.Balance(ctx, pool, "eve")
		check(err)
		fmt.Println(b.Units, "units")
	}
	// Output:
	// 20 units
	// 100 units
	// 100 units
}

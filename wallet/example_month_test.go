package wallet_test

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A plan's units end with the calendar month, in the customer's time zone. Up to 100 units that are left go on until
// the end of the next month. The customer's statement of December has the balance before and after.
func ExampleBook_Statement_month() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	november := time.Date(2026, time.November, 1, 0, 0, 0, 0, berlin)
	december, january, february := november.AddDate(0, 1, 0), november.AddDate(0, 2, 0), november.AddDate(0, 3, 0)
	pool, setClock, done := exampleDatabaseAt(november)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	include := func(starts, ends, next time.Time) {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := book.Grant(ctx, tx, wallet.Grant{
				Wallet: "ann", Amount: 300, Category: "included", Reference: "plan " + starts.Format("2006-01"),
				Ends: wallet.At(ends), Roll: &wallet.Roll{Cap: 100, Lasts: wallet.For(next.Sub(ends))},
			})
			return err
		}))
	}
	draw := func(amount int64) {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, book.Charge("ann", amount))
			return err
		}))
	}
	include(november, december, january)
	draw(120)
	setClock(december.Add(time.Minute))
	include(december, january, february)
	draw(350)

	balance := int64(0)
	for line, err := range book.Statement(ctx, pool, "ann", budget.EntriesOptions{To: december, NewestFirst: true, Max: 1}) {
		check(err)
		balance = line.Balance
	}
	fmt.Println("opening balance", balance)
	for line, err := range book.Statement(ctx, pool, "ann", budget.EntriesOptions{From: december, To: january}) {
		check(err)
		var lots []string
		for _, m := range line.Lots {
			lots = append(lots, fmt.Sprint(m.Kind, " ", m.Amount))
		}
		fmt.Println(line.At.In(berlin).Format("2 Jan 15:04"), line.Kind, line.Amount, "balance", line.Balance, strings.Join(lots, ", "))
		balance = line.Balance
	}
	fmt.Println("closing balance", balance)
	b, err := book.Balance(ctx, pool, "ann")
	check(err)
	fmt.Println(b.Of("included"), "included units;", b.Expiring(february), "end before February")
	// Output:
	// opening balance 180
	// 1 Dec 00:00 roll over 100 balance 80 rolled over 100
	// 1 Dec 00:00 credit 100 balance 180 credited 100
	// 1 Dec 00:00 lapse 80 balance 100 lapsed 80
	// 1 Dec 00:01 credit 300 balance 400 credited 300
	// 1 Dec 00:01 charge 350 balance 50 taken 100, taken 250
	// closing balance 50
	// 50 included units; 50 end before February
}

package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// A customer has promotional credit, which ends, and credit that was paid for, which does not. The promotional credit is drawn first.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{Priorities: map[string]int{"promotional": 1, "paid": 2}})
	check(err)

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for range 2 { // the payment's webhook comes twice
			g, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 1000, Category: "paid", Reference: "payment 17"})
			if err != nil {
				return err
			}
			fmt.Println("granted before:", g.Replayed)
		}
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 50, Category: "promotional", Reference: "welcome", Ends: wallet.After(30 * 24 * time.Hour)})
		return err
	}))

	var receipt budget.Receipt
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		draw := book.Charge("ann", 80)
		draw.Lots = true
		receipt, err = ledger.Charge(ctx, tx, draw)
		return err
	}))
	for _, p := range receipt.Entries[0].Lots {
		fmt.Println(p.Amount, p.Category)
	}

	// A reservation, of which less is used than was held.
	reservations, err := holds.New(ledger, holds.Config{})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		h, err := reservations.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{book.Line("ann", 500)}})
		if err != nil {
			return err
		}
		_, err = reservations.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{{Scope: "ann", Amount: 120}}})
		return err
	}))

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := ledger.Charge(ctx, tx, book.Charge("ann", 5000))
		return err
	})
	var exceeded *budget.ExceededError
	if errors.As(err, &exceeded) {
		fmt.Println("there is", exceeded.Refusals[0].Available)
	}
	// Output:
	// granted before: false
	// granted before: true
	// 50 promotional
	// 30 paid
	// there is 850
}

// A month's credit, of which up to 100 units go on in the next month, a payment that bounced, and a customer's statement.
func ExampleBook_Statement() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	month := 30 * 24 * time.Hour

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ben", Amount: 300, Reference: "November", Ends: wallet.After(month), Roll: &wallet.Roll{Cap: 100, Lasts: wallet.For(month)}})
		if err != nil {
			return err
		}
		draw, err := ledger.Charge(ctx, tx, book.Charge("ben", 70))
		if err != nil {
			return err
		}
		if _, err := ledger.Refund(ctx, tx, budget.Refund{Scope: "ben", Seq: draw.Entries[0].Seq, Amount: 10}); err != nil {
			return err
		}
		r, err := book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ben", Reference: "November", Amount: 280})
		fmt.Println("revoked", r.Amount, "missing", r.Missing)
		return err
	}))
	for line, err := range book.Statement(ctx, pool, "ben", budget.EntriesOptions{}) {
		check(err)
		fmt.Println(line.Kind, line.Amount, "balance", line.Balance, line.Lots[0].Kind, line.Lots[0].Reference)
	}
	b, err := book.Balance(ctx, pool, "ben")
	check(err)
	fmt.Println(b.Units, "units in", len(b.Lots), "lots; expiring:", b.Expiring(b.Now.Add(2*month)))
	// Output:
	// revoked 240 missing 40
	// credit 300 balance 300 credited November
	// charge 70 balance 230 taken November
	// refund 10 balance 240 given back November
	// revoke 240 balance 0 revoked November
	// 0 units in 0 lots; expiring: 0
}

// The sweeper: every few minutes, in as many processes as you like. Its subscriber books each lapse, in the same
// transaction.
func ExampleBook_Sweep() {
	ctx := context.Background()
	noon := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(noon)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{Subscribers: []wallet.Subscriber{
		func(ctx context.Context, tx pgx.Tx, b wallet.Breakage) error {
			fmt.Println(b.Amount, "of", b.Reference, "lapsed")
			return nil // here: enqueue a job, or write to your own books, through tx
		},
	}})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "cat", Amount: 10, Reference: "an hour", Ends: wallet.After(time.Hour)})
		return err
	}))
	setClock(noon.Add(time.Hour))
	report, err := book.Sweep(ctx, pool, wallet.SweepOptions{})
	check(err)
	fmt.Println(report.Ended, "ended,", report.Announced, "announced")
	// Output:
	// 10 of an hour lapsed
	// 1 ended, 1 announced
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// A plan includes 100 images, and the customer has bought 50 units for anything. A draw names its use. Lots that pay for it come in the
// order of all lots.
func ExampleBook_Charge_use() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{Priorities: map[string]int{"included": 1, "paid": 2}})
	check(err)
	reservations, err := holds.New(ledger, holds.Config{})
	check(err)
	show := func() {
		b, err := book.Balance(ctx, pool, "ann")
		check(err)
		fmt.Println("for images", b.For("images"), "- for tokens", b.For("tokens"))
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 100, Category: "included", Uses: []string{"images"}, Reference: "plan"})
		if err != nil {
			return err
		}
		_, err = book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 50, Category: "paid", Reference: "payment 17"})
		return err
	})
	check(err)
	show()

	images := budget.Note{Use: "images"}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		draw := book.Charge("ann", 120)
		draw.Note, draw.Lots = images, true
		r, err := ledger.Charge(ctx, tx, draw)
		if err != nil {
			return err
		}
		for _, l := range r.Entries[0].Lots {
			fmt.Println("drew", l.Amount, "of", l.Reference)
		}
		_, err = ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: r.Entries[0].Seq, Amount: 60}) // back to the lots that paid
		return err
	})
	check(err)
	show()

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := reservations.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{book.Line("ann", 30)}, Note: images})
		return err
	})
	check(err)
	show()
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		draw := book.Charge("ann", 51)
		draw.Note = budget.Note{Use: "tokens"}
		_, err := ledger.Charge(ctx, tx, draw)
		return err
	})
	fmt.Println(errors.Is(err, budget.ErrExceeded))
	// Output:
	// for images 150 - for tokens 50
	// drew 100 of plan
	// drew 20 of payment 17
	// for images 90 - for tokens 50
	// for images 60 - for tokens 50
	// true
}

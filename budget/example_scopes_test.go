package budget_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Seat is the key of a seat.
type Seat struct {
	Event  int64
	Number string
}

// Seats are declared once: each can be sold once, and has to be created.
var Seats = budget.Scopes[Seat]{Kind: "seat", Limits: []budget.Limit{budget.Lifetime(1)}, MustExist: true}

// A kind of resource is declared once. A mistyped seat is unknown, and not for sale.
func ExampleScopes() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	check(Seats.Check())
	ledger, err := budget.New(budget.Config{})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		made, err := ledger.Create(ctx, tx, Seats.Scope(Seat{7, "21A"}), Seats.Scope(Seat{7, "21B"}))
		fmt.Println("created:", made[0].Changed, made[1].Changed)
		return err
	}))
	sell := func(number string) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, Seats.Charge(Seat{7, number}, 1))
			return err
		})
		fmt.Println(number, "sold:", errors.Is(err, budget.ErrExceeded), "unknown:", errors.Is(err, budget.ErrScopeUnknown), "now ours:", err == nil)
	}
	sell("21A")
	sell("21A")
	sell("2lA")

	// A report reads the scopes back.
	for r, err := range ledger.Resources(ctx, pool, Seats.Prefix()) {
		check(err)
		seat, err := Seats.Parse(r.Scope)
		check(err)
		usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: r.Scope})
		check(err)
		fmt.Println("event", seat.Event, "seat", seat.Number, "sold", usage[0].Used)
	}
	// A seat behind a pillar is not for sale, until the pillar is gone.
	for _, change := range []func(context.Context, pgx.Tx, ...string) ([]budget.Resource, error){ledger.Retire, ledger.Restore} {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			changed, err := change(ctx, tx, Seats.Scope(Seat{7, "21B"}))
			fmt.Println("changed:", changed[0].Changed)
			return err
		}))
		sell("21B")
	}
	// Output:
	// created: true true
	// 21A sold: false unknown: false now ours: true
	// 21A sold: true unknown: false now ours: false
	// 2lA sold: false unknown: true now ours: false
	// event 7 seat 21A sold 1
	// event 7 seat 21B sold 0
	// changed: true
	// 21B sold: false unknown: false now ours: false
	// changed: true
	// 21B sold: false unknown: false now ours: true
}

// Stock is the units of an article in stock: a delivery is credited, and units that were never delivered cannot be sold.
var Stock = budget.Scopes[string]{Kind: "stock", Limits: []budget.Limit{budget.Prepaid(0).Named("in stock")}}

func ExampleScopes_Credit() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { // with the row of the delivery
		_, err := ledger.Credit(ctx, tx, Stock.Credit("lamp", 12))
		return err
	}))
	for _, order := range []int64{10, 3} {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			receipt, err := ledger.Charge(ctx, tx, Stock.Charge("lamp", order))
			var exceeded *budget.ExceededError
			if errors.As(err, &exceeded) {
				fmt.Println("of", order, "lamps there are", exceeded.Refusals[0].Available)
				return nil
			}
			if err == nil {
				fmt.Println("sold", order, "and", receipt.Entries[0].Standings[0].Available, "are left")
			}
			return err
		}))
	}
	// Output:
	// sold 10 and 2 are left
	// of 3 lamps there are 2
}

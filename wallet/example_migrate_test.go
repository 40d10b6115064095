package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// oldEvent is a usage event of the system that is left.
type oldEvent struct {
	id     string
	units  int64
	at     time.Time
	wallet string
}

// oldSystem stands for its API: the credit that each customer had at the cut, by lot, and the events since.
type oldSystem struct {
	cut    time.Time
	lots   []wallet.Grant
	events []oldEvent
}

func (o *oldSystem) use(id, customer string, units int64, at time.Time) oldEvent {
	e := oldEvent{id, units, at, customer}
	o.events = append(o.events, e)
	return e
}

func (o *oldSystem) balance(customer string) (units int64) {
	for _, g := range o.lots {
		if g.Wallet == customer {
			units += g.Amount
		}
	}
	for _, e := range o.events {
		if e.wallet == customer {
			units -= e.units
		}
	}
	return units
}

// Balances and usage move over while requests come in: shadow, compare, switch. Each event is counted once by its id, so live events
// and the backfill may overlap.
func Example_migrate() {
	ctx := context.Background()
	cut := time.Date(2026, time.December, 1, 0, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(cut.Add(48 * time.Hour))
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	old := &oldSystem{cut: cut, lots: []wallet.Grant{
		{Wallet: "ann", Reference: "promo", Category: "promotional", Amount: 100, Ends: wallet.At(cut.AddDate(0, 1, 0))},
		{Wallet: "ann", Reference: "invoice 17", Category: "paid", Amount: 400},
		{Wallet: "ben", Reference: "invoice 18", Category: "paid", Amount: 50},
	}}
	old.use("e1", "ann", 30, cut.Add(time.Hour)) // before anything is sent here
	old.use("e2", "ben", 20, cut.Add(2*time.Hour))

	// Shadow: the old system decides. Each event is recorded here, too, without a limit, so nothing is refused.
	record := func(events ...oldEvent) (counted int) {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			var all []budget.UsageEvent
			for _, e := range events {
				all = append(all, budget.UsageEvent{
					Tenant: "old system", ID: e.id, OccurredAt: e.at, Charge: budget.Charge{Scope: e.wallet, Amount: e.units},
				})
			}
			results, err := ledger.Ingest(ctx, tx, all...)
			for _, r := range results {
				if err = errors.Join(err, r.Err); !r.Posted.Replayed {
					counted++
				}
			}
			return err
		}))
		return counted
	}
	importLots := func() {
		for _, g := range old.lots {
			check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := book.Grant(ctx, tx, g) // once, by its reference
				return err
			}))
		}
	}
	fmt.Println("live:", record(old.use("e3", "ann", 40, cut.Add(48*time.Hour)))) // it finds no credit yet, which is overdraft
	importLots()
	importLots()
	fmt.Println("backfill:", record(old.events...))
	setClock(cut.Add(49 * time.Hour))
	fmt.Println("live:", record(old.use("e4", "ben", 5, cut.Add(49*time.Hour))))

	// Compare: each customer, at a moment at which none of their events is under way.
	for _, customer := range []string{"ann", "ben"} {
		b, err := book.Balance(ctx, pool, customer)
		check(err)
		fmt.Printf("%s: %d there, %d here\n", customer, old.balance(customer), b.Units)
	}

	// Switch: now the draw decides, in the transaction of the work. The old system may still get the events.
	draw := func(customer string, amount int64) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, book.Charge(customer, amount))
			return err
		})
	}
	fmt.Println(draw("ben", 25), errors.Is(draw("ben", 1), budget.ErrExceeded))
	// Output:
	// live: 1
	// backfill: 2
	// live: 1
	// ann: 430 there, 430 here
	// ben: 25 there, 25 here
	// <nil> true
}

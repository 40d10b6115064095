package budget_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// 10 requests a second in bursts of up to 50, as limits. One window is stricter than a token bucket, and a pair is more generous.
func Example_rate() {
	ctx := context.Background()
	now := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(now)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)

	const rate, burst = 10, 50
	window := burst * time.Second / rate // 5s
	strict := []budget.Limit{budget.PerWindow(burst, window)}
	generous := []budget.Limit{budget.PerWindow(2*burst, window), budget.PerWindow(17*burst, 16*window)}

	admitted := func(scope string, limits []budget.Limit) (n int) {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for {
				_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 10, Limits: limits})
				if errors.Is(err, budget.ErrExceeded) {
					return nil
				} else if err != nil {
					return err
				}
				n += 10
			}
		}))
		return n
	}
	fmt.Println("at once:", admitted("a", strict), admitted("b", generous))
	setClock(now.Add(2 * time.Second)) // a bucket would have 20 tokens by now
	fmt.Println("after 2s:", admitted("a", strict), admitted("b", generous))
	setClock(now.Add(5 * time.Second))
	fmt.Println("after 5s:", admitted("a", strict), admitted("b", generous))
	// Output:
	// at once: 50 100
	// after 2s: 0 0
	// after 5s: 50 100
}

// An administrator resets the window of a key: all of its charges are refunded, each as an entry with a note. The refunds count at the
// time of their charges, so nothing comes back when these leave the window.
func Example_reset() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	daily := budget.PerWindow(100, 24*time.Hour)
	spend := func() error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "key/42", Amount: 50, Limits: []budget.Limit{daily}})
			return err
		})
	}
	check(spend())
	check(spend())
	fmt.Println(errors.Is(spend(), budget.ErrExceeded))

	reset := func(scope string, window time.Duration, by budget.Note) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := ledger.Lock(ctx, tx, scope); err != nil {
				return err
			}
			since := time.Now().Add(-window)
			for e, err := range ledger.Entries(ctx, tx, scope, budget.EntriesOptions{NewestFirst: true}) {
				if err != nil || e.At.Before(since) {
					return err
				}
				if e.Kind != "charge" && e.Kind != "capture" {
					continue
				}
				_, err := ledger.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: e.Seq, All: true, Note: by})
				if err != nil && !errors.Is(err, budget.ErrRefundExceeds) { // nothing is left of a charge that was refunded
					return err
				}
			}
			return nil
		})
	}
	check(reset("key/42", daily.Window, budget.Note{Actor: "admin:ann", Reason: "reset"}))
	fmt.Println(spend())
	for e, err := range ledger.Entries(ctx, pool, "key/42", budget.EntriesOptions{NewestFirst: true}) {
		check(err)
		fmt.Println(e.Kind, e.Amount, e.Note.Reason != "")
	}
	// Output:
	// true
	// <nil>
	// charge 50 false
	// refund 50 true
	// refund 50 true
	// charge 50 false
	// charge 50 false
}

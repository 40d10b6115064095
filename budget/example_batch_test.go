package budget_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// The messages of a queue are charged together, each on its own: a user over the limit keeps no other waiting.
func ExampleLedger_ChargeEach() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	limits := []budget.Limit{budget.PerWindow(100, time.Hour)}

	var results []budget.Result
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		results, err = ledger.ChargeEach(ctx, tx,
			budget.Charge{Scope: "org/acme", Amount: 70, Limits: limits},
			budget.Charge{Scope: "org/beta", Amount: 10, Limits: limits},
			budget.Charge{Scope: "org/acme", Amount: 40, Limits: limits},
			budget.Charge{Scope: "org/acme", Amount: 30, Limits: limits})
		return err
	}))
	for _, r := range results {
		var exceeded *budget.ExceededError
		switch {
		case errors.As(r.Err, &exceeded):
			fmt.Println("refused, available:", exceeded.Refusals[0].Available)
		case r.Err != nil:
			fmt.Println(r.Err)
		default:
			fmt.Println(r.Posted.Scope, "entry", r.Posted.Seq, "left", r.Posted.Standings[0].Available)
		}
	}
	// Output:
	// org/acme entry 1 left 30
	// org/beta entry 1 left 90
	// refused, available: 30
	// org/acme entry 2 left 0
}

// A webhook delivers an event twice, and one late. Each is counted once, with its own time.
func ExampleLedger_Ingest() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	yesterday := time.Now().Add(-24 * time.Hour)
	events := []budget.UsageEvent{
		{ID: "evt_1", Charge: budget.Charge{Scope: "tokens/acme", Amount: 1200}},
		{ID: "evt_2", Charge: budget.Charge{Scope: "tokens/acme", Amount: 300}, OccurredAt: yesterday},
	}

	for range 2 { // the delivery, and its repetition
		var results []budget.Result
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			results, err = ledger.Ingest(ctx, tx, events...)
			return err
		}))
		for _, r := range results {
			check(r.Err)
			fmt.Println("entry", r.Posted.Seq, "replayed", r.Posted.Replayed)
		}
	}
	for entry, err := range ledger.Entries(ctx, pool, "tokens/acme", budget.EntriesOptions{}) {
		check(err)
		fmt.Println(entry.Operation, entry.Amount, "late:", !entry.OccurredAt.IsZero())
	}
	// Output:
	// entry 1 replayed false
	// entry 2 replayed false
	// entry 1 replayed true
	// entry 2 replayed true
	// evt_1 1200 late: false
	// evt_2 300 late: true
}

// A rate limiter for requests that have no transaction of their own: the requests of all goroutines share commits, and
// each gets an answer that is exact and durable.
func ExampleBatcher() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	batcher, err := budget.NewBatcher(pool, ledger, budget.BatcherConfig{})
	check(err)

	var let, refused atomic.Int32
	var requests sync.WaitGroup
	for range 50 {
		requests.Go(func() {
			_, err := batcher.Charge(ctx, budget.Charge{Scope: "search/ann", Amount: 1, Limits: []budget.Limit{budget.PerWindow(20, time.Minute)}})
			switch {
			case errors.Is(err, budget.ErrExceeded):
				refused.Add(1)
			default:
				check(err)
				let.Add(1)
			}
		})
	}
	requests.Wait()
	fmt.Println(let.Load(), "let in,", refused.Load(), "refused")
	check(batcher.Close(ctx)) // at shutdown
	// Output: 20 let in, 30 refused
}

// A queue delivers each message at least once, to any of several consumers. Each is acknowledged when it is on record, and the
// messages of all consumers share commits.
func ExampleBatcher_Ingest() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	batcher, err := budget.NewBatcher(pool, ledger, budget.BatcherConfig{})
	check(err)

	queue := make(chan string, 40)
	for i := range cap(queue) { // 20 messages, and each once more
		queue <- fmt.Sprint("msg_", i%20)
	}
	close(queue)
	var counted, again atomic.Int32
	var consumers sync.WaitGroup
	for range 8 {
		consumers.Go(func() {
			for id := range queue {
				posted, err := batcher.Ingest(ctx, budget.UsageEvent{ID: id, Charge: budget.Charge{Scope: "mails/acme", Amount: 1}})
				switch {
				case err != nil: // not acknowledged: the queue delivers it again, which does no harm
					fmt.Println(err)
				case posted.Replayed:
					again.Add(1)
				default:
					counted.Add(1)
				}
			}
		})
	}
	consumers.Wait()
	check(batcher.Close(ctx))
	usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: "mails/acme"})
	check(err)
	fmt.Println(counted.Load(), "counted,", again.Load(), "seen before,", usage[0].Used, "on the bill")
	// Output: 20 counted, 20 seen before, 20 on the bill
}

// The same for a lone request, in one line.
func ExampleLedger_ChargeNow() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)

	for range 3 {
		_, err := ledger.ChargeNow(ctx, pool, budget.Charge{Scope: "login/ann", Amount: 1, Limits: []budget.Limit{budget.PerWindow(2, time.Minute)}})
		fmt.Println("let in:", err == nil, "refused:", errors.Is(err, budget.ErrExceeded))
	}
	// Output:
	// let in: true refused: false
	// let in: true refused: false
	// let in: false refused: true
}

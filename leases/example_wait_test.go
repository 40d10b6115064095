package leases_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

// Wait for room, as Limiter.WaitN of golang.org/x/time/rate does: until the units fit, and not at all if that would be after
// the context's deadline, or never.
func ExamplePool_Limiter_wait() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	pool, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "mail/"}}})
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close(ctx)
	wait := func(ctx context.Context, allow func(context.Context, int64) error, n int64) error {
		for {
			err := allow(ctx, n)
			var refused *budget.ExceededError
			if !errors.As(err, &refused) {
				return err
			}
			after := refused.RetryAfter()
			if deadline, ok := ctx.Deadline(); after == budget.Never || ok && time.Until(deadline) < after {
				return err
			}
			select {
			case <-time.After(after):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	limiter := func(scope string, limit budget.Limit) func(context.Context, int64) error {
		l, err := pool.Limiter(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{limit}})
		if err != nil {
			log.Fatal(err)
		}
		return l
	}
	burst := limiter("mail/acme", budget.PerWindow(2, 200*time.Millisecond))
	began := time.Now()
	for range 5 {
		if err := wait(ctx, burst, 1); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(time.Since(began) >= 400*time.Millisecond)
	fmt.Println(errors.Is(wait(ctx, burst, 3), budget.ErrExceeded)) // never fits

	hourly := limiter("mail/ann", budget.PerWindow(1, time.Hour))
	minute, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	fmt.Println(wait(minute, hourly, 1))
	fmt.Println(errors.Is(wait(minute, hourly, 1), budget.ErrExceeded)) // at once: an hour is too long
	// Output:
	// true
	// true
	// <nil>
	// true
}

package budget_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// A plan is several limits of one charge: any second, the customer's month, and the trial as a whole. Each refusal says which
// of them refused, and when the same amount fits.
func Example_plan() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	since := time.Date(2026, 1, 31, 9, 0, 0, 0, berlin)
	pool, setClock, done := exampleDatabaseAt(since)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)

	plan := []budget.Limit{
		budget.PerWindow(300, time.Second).Named("burst"),             // of any second
		budget.Per(1_000, budget.Month, berlin, since).Named("month"), // from the 31st on, by the clocks of Berlin
		budget.Lifetime(1_500).Named("trial"),                         // in all
	}
	spend := func(amount int64) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// Your own writes: they and the charge commit together.
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "calls/acme", Amount: amount, Limits: plan})
			return err
		})
		var refused *budget.ExceededError
		if !errors.As(err, &refused) {
			check(err)
			return
		}
		for _, r := range refused.Refusals {
			switch {
			case r.RetryAfter == budget.Never:
				fmt.Printf("%s: %d left, waiting does not help\n", r.Limit.Name, r.Available)
			default:
				fmt.Printf("%s: %d left, try again in %v\n", r.Limit.Name, r.Available, r.RetryAfter)
			}
		}
	}
	spend(250)
	spend(100) // in the same second
	for n := range 3 {
		setClock(since.Add(time.Duration(n+1) * time.Hour))
		spend(240)
	}
	setClock(since.AddDate(0, 0, 27))
	spend(240) // on the 27th of February, before the second month begins on the 28th, at 9:00
	for n := range 2 {
		setClock(since.AddDate(0, 0, 28+n))
		spend(300)
	}
	// Output:
	// burst: 50 left, try again in 1s
	// month: 30 left, try again in 24h0m0s
	// trial: 230 left, waiting does not help
}

// The periods of a subscription that was taken out on the 31st. Clocks are set forward on the 29th of March.
func Example_anchor() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	since := time.Date(2026, 1, 31, 9, 0, 0, 0, berlin)
	pool, setClock, done := exampleDatabaseAt(since)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)

	month := budget.Per(1_000, budget.Month, berlin, since).Period
	for now := since; now.Before(since.AddDate(0, 4, 0)); {
		setClock(now)
		usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: "calls/acme", Period: month})
		check(err)
		start, end := usage[0].PeriodStart.In(berlin), usage[0].PeriodEnd.In(berlin)
		fmt.Println(start.Format("2 Jan 15:04"), "to", end.Format("2 Jan 15:04"), end.Sub(start))
		now = end
	}
	// Output:
	// 31 Jan 09:00 to 28 Feb 09:00 672h0m0s
	// 28 Feb 09:00 to 31 Mar 09:00 743h0m0s
	// 31 Mar 09:00 to 30 Apr 09:00 720h0m0s
	// 30 Apr 09:00 to 31 May 09:00 744h0m0s
}

// A run under a user under an organisation: one call charges all of them, or none.
func Example_levels() {
	ctx := context.Background()
	pool, _, done := exampleDatabaseAt(time.Date(2026, 4, 10, 9, 0, 0, 0, time.UTC))
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)

	spend := func(run, user, org string, amount int64) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx,
				budget.Charge{Scope: "run/" + run, Amount: amount, Limits: []budget.Limit{budget.Lifetime(100)}},
				budget.Charge{Scope: "user/" + user, Amount: amount, Limits: []budget.Limit{budget.Per(250, budget.Day, time.UTC, time.Time{})}},
				budget.Charge{Scope: "org/" + org, Amount: amount, Limits: []budget.Limit{budget.Per(500, budget.Month, time.UTC, time.Time{})}},
			)
			return err
		})
	}
	for _, run := range []string{"1", "2", "3"} {
		err := spend(run, "ann", "acme", 90)
		var refused *budget.ExceededError
		if errors.As(err, &refused) {
			for _, r := range refused.Refusals {
				fmt.Printf("run %s: %s has %d left\n", run, r.Scope, r.Available)
			}
		} else {
			check(err)
		}
	}
	usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: "run/3"}, budget.Query{Scope: "org/acme"})
	check(err)
	fmt.Println("run 3 used", usage[0].Used, "and the organisation", usage[1].Used)
	// Output:
	// run 3: user/ann has 70 left
	// run 3 used 0 and the organisation 180
}

// A change of plan keeps the used units. In the month of the change, a limit can be the sum of a part of each plan.
func Example_planChange() {
	ctx := context.Background()
	start := time.Date(2026, 4, 1, 0, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(start)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)

	spend := func(amount, max int64) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			limit := budget.Per(max, budget.Month, time.UTC, time.Time{})
			receipt, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "calls/acme", Amount: amount, Limits: []budget.Limit{limit}})
			if err == nil {
				fmt.Println("left:", receipt.Entries[0].Standings[0].Available)
			}
			return err
		})
		if err != nil {
			fmt.Println("refused:", errors.Is(err, budget.ErrExceeded))
		}
	}
	spend(900, 1_000)
	setClock(start.AddDate(0, 0, 20))
	month := budget.Per(1_000, budget.Month, time.UTC, time.Time{}).Period
	more, err := month.Prorate(4_000-1_000, start.AddDate(0, 0, 20))
	check(err)
	spend(900, 1_000+more) // up: 1,000 more in the last third of April
	spend(1, 1_000)        // down again: over it until May
	setClock(start.AddDate(0, 1, 0))
	spend(1, 1_000)
	// Output:
	// left: 100
	// left: 200
	// refused: true
	// left: 999
}

// 1,000 units a month are free, more units are paid from credit, and units that the credit does not cover are billed,
// up to a cap. The lock makes the look and the charge one: no free unit is counted twice.
func Example_overage() {
	ctx := context.Background()
	pool, _, done := exampleDatabaseAt(time.Date(2026, 4, 10, 9, 0, 0, 0, time.UTC))
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := ledger.Credit(ctx, tx, budget.Credit{Scope: "credit/acme", Amount: 300})
		return err
	}))

	free := budget.Per(1_000, budget.Month, time.UTC, time.Time{})
	capped := budget.Per(2_000, budget.Month, time.UTC, time.Time{})
	spend := func(ctx context.Context, tx pgx.Tx, amount int64) error {
		if err := ledger.Lock(ctx, tx, "free/acme", "credit/acme", "overage/acme"); err != nil {
			return err
		}
		usage, err := ledger.Usage(ctx, tx, budget.Query{Scope: "free/acme", Period: free.Period}, budget.Query{Scope: "credit/acme"})
		if err != nil {
			return err
		}
		parts := []budget.Charge{
			{Scope: "free/acme", Amount: min(amount, usage[0].Available(free.Max)), Limits: []budget.Limit{free}},
			{Scope: "credit/acme", Limits: []budget.Limit{budget.Prepaid(0)}},
			{Scope: "overage/acme", Limits: []budget.Limit{capped}},
		}
		parts[1].Amount = min(amount-parts[0].Amount, usage[1].Available(0))
		parts[2].Amount = amount - parts[0].Amount - parts[1].Amount
		charges := parts[:0]
		for _, part := range parts {
			if part.Amount > 0 {
				charges = append(charges, part)
			}
		}
		_, err = ledger.Charge(ctx, tx, charges...)
		return err
	}
	for _, amount := range []int64{900, 500, 3_000} {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return spend(ctx, tx, amount) })
		fmt.Println(amount, "let in:", err == nil)
	}
	usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: "free/acme"}, budget.Query{Scope: "credit/acme"}, budget.Query{Scope: "overage/acme"})
	check(err)
	fmt.Println("free:", usage[0].Spent, "from credit:", usage[1].Spent, "to be billed:", usage[2].Spent)
	// Output:
	// 900 let in: true
	// 500 let in: true
	// 3000 let in: false
	// free: 1000 from credit: 300 to be billed: 100
}

// A purge must keep as long as the longest limit in use counts.
func ExampleLimit_Reach() {
	plan := []budget.Limit{
		budget.PerWindow(20, time.Second), budget.Per(1_000, budget.Month, time.UTC, time.Time{}), budget.Lifetime(5_000),
	}
	var keep time.Duration
	for _, limit := range plan {
		keep = max(keep, limit.Reach())
	}
	fmt.Println(budget.PurgeOptions{OlderThan: keep}.OlderThan)
	// Output: 768h0m0s
}

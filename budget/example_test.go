package budget_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Bytes are charged against an hourly and a daily limit, in the transaction that stores them.
func ExampleLedger_Charge() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	limits := []budget.Limit{
		budget.PerWindow(1_000, time.Hour).Named("hourly"),
		budget.PerWindow(5_000, 24*time.Hour).Named("daily"),
	}

	for _, size := range []int64{700, 400} {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// Your own writes go here: they and the charge commit together or not at all.
			receipt, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: size, Limits: limits})
			if err != nil {
				return err
			}
			for _, s := range receipt.Entries[0].Standings {
				fmt.Printf("%s: used %d, %d left\n", s.Limit.Name, s.Used, s.Available)
			}
			return nil
		})
		var exceeded *budget.ExceededError
		if errors.As(err, &exceeded) {
			r := exceeded.Refusals[0]
			fmt.Printf("%s limit refuses %d of %d left, retry within the hour: %v\n",
				r.Limit.Name, r.Requested, r.Available, r.RetryAfter <= time.Hour)
		} else {
			check(err)
		}
	}
	// Output:
	// hourly: used 700, 300 left
	// daily: used 700, 4300 left
	// hourly limit refuses 400 of 300 left, retry within the hour: true
}

// Prepaid credit is a lifetime limit of 0: nothing is spent that was not credited.
func ExampleLedger_Credit() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	prepaid := []budget.Limit{budget.Prepaid(0).Named("prepaid")}
	spend := func(cents int64) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "wallet/ann", Amount: cents, Limits: prepaid})
			return err
		})
		fmt.Printf("spend %d: %v\n", cents, err)
	}

	spend(300)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := ledger.Credit(ctx, tx, budget.Credit{Scope: "wallet/ann", Amount: 1_000})
		return err
	}))
	spend(300)
	spend(800)
	// Output:
	// spend 300: budget: limit exceeded: scope "wallet/ann", limit "prepaid": requested 300, available 0, the credit left, needs more credit
	// spend 300: <nil>
	// spend 800: budget: limit exceeded: scope "wallet/ann", limit "prepaid": requested 800, available 700, the credit left, needs more credit
}

// A refund gives back part of a charge, and never more than was charged.
func ExampleLedger_Refund() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		receipt, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 100})
		check(err)
		charged := receipt.Entries[0]

		_, err = ledger.Refund(ctx, tx, budget.Refund{Scope: charged.Scope, Seq: charged.Seq, Amount: 30})
		check(err)
		_, err = ledger.Refund(ctx, tx, budget.Refund{Scope: charged.Scope, Seq: charged.Seq, Amount: 80})
		fmt.Println(err)
		return nil // a refused refund wrote nothing and leaves the transaction usable
	}))
	for e, err := range ledger.Entries(ctx, pool, "org/acme", budget.EntriesOptions{}) {
		check(err)
		fmt.Printf("%d %s %d: spent %d, refunded %d\n", e.Seq, e.Kind, e.Amount, e.Spent, e.Refunded)
	}
	// Output:
	// budget: the refund exceeds the rest of the charge: requested 80, left 70
	// 1 charge 100: spent 100, refunded 0
	// 2 refund 30: spent 100, refunded 30
}

// A statement shows the last entries first, a page at a time.
func ExampleLedger_Entries() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	for _, cents := range []int64{500, 200, 300} {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Credit(ctx, tx, budget.Credit{Scope: "wallet/ann", Amount: cents})
			return err
		}))
	}
	page := func(before int64) (last int64) {
		opts := budget.EntriesOptions{NewestFirst: true, Before: before, Max: 2}
		for e, err := range ledger.Entries(ctx, pool, "wallet/ann", opts) {
			check(err)
			fmt.Printf("%d %s %d, balance %d\n", e.Seq, e.Kind, e.Amount, e.Credited-e.Spent+e.Refunded)
			last = e.Seq
		}
		return last
	}
	last := page(0)
	fmt.Println("earlier:")
	page(last)
	// Output:
	// 3 credit 300, balance 1000
	// 2 credit 200, balance 700
	// earlier:
	// 1 credit 500, balance 500
}

// Ann says that she was charged for an import that failed. Support looks for it, newest first.
func ExampleLedger_Entries_byNote() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	for i := range 25 {
		charge := budget.Charge{Scope: "rows/acme", Amount: int64(i) + 1, Note: budget.Note{Actor: "user:ben", Reason: "import"}}
		if i%10 == 4 {
			charge.Note.Actor = "user:ann"
		}
		_, err := ledger.ChargeNow(ctx, pool, charge)
		check(err)
	}

	imports := budget.EntriesOptions{NewestFirst: true, Note: budget.Note{Actor: "user:ann", Reason: "import"}}
	for e, err := range ledger.Entries(ctx, pool, "rows/acme", imports) {
		check(err)
		fmt.Println("entry", e.Seq, e.Kind, e.Amount)
	}
	// Output:
	// entry 25 charge 25
	// entry 15 charge 15
	// entry 5 charge 5
}

// Entries are kept for the longest window of any limit. Limits by address come and go: idle scopes are deleted whole.
func ExampleLedger_Purge() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	_, err = ledger.ChargeNow(ctx, pool, budget.Charge{Scope: "address/192.0.2.1", Amount: 1})
	check(err)

	report, err := ledger.Purge(ctx, pool, budget.PurgeOptions{
		OlderThan: 35 * 24 * time.Hour,
		Forget:    func(scope string) bool { return strings.HasPrefix(scope, "address/") },
	})
	check(err)
	fmt.Println("looked at", report.Scopes, "and deleted", report.Entries, "entries")
	// Output: looked at 1 and deleted 0 entries
}

// Usage looks at many scopes and windows in one round trip.
func ExampleLedger_Usage() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := ledger.Charge(ctx, tx,
			budget.Charge{Scope: "org/acme", Amount: 5}, budget.Charge{Scope: "user/ann", Amount: 2})
		return err
	}))
	usages, err := ledger.Usage(ctx, pool,
		budget.Query{Scope: "org/acme", Window: time.Hour},
		budget.Query{Scope: "org/acme"}, // the lifetime
		budget.Query{Scope: "user/ann", Window: time.Hour},
		budget.Query{Scope: "user/bob", Window: time.Hour})
	check(err)
	for _, u := range usages {
		fmt.Println(u.Scope, u.Window, u.Used)
	}
	// Output:
	// org/acme 1h0m0s 5
	// org/acme 0s 5
	// user/ann 1h0m0s 2
	// user/bob 1h0m0s 0
}

// Charges of a scope wait, and an operator wants to know why: the key of its lock leads to the session that has it.
func ExampleLedger_LockKey() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	slow, err := pool.Begin(ctx) // a transaction that charges, and then takes its time
	check(err)
	_, err = slow.Exec(ctx, `set local application_name = 'nightly import'`)
	check(err)
	_, err = ledger.Charge(ctx, slow, budget.Charge{Scope: "rows/acme", Amount: 1})
	check(err)

	var name, state string
	check(pool.QueryRow(ctx, `
select a.application_name, a.state
from pg_locks l join pg_stat_activity a using (pid)
where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
  and l.database = (select oid from pg_database where datname = current_database())
  and (l.classid::bigint << 32 | l.objid::bigint) = $1`, ledger.LockKey("rows/acme")).Scan(&name, &state))
	fmt.Printf("%s, %s\n", name, state)
	check(slow.Rollback(ctx))
	// Output: nightly import, idle in transaction
}

// Parts are escaped, so that different parts never name the same scope.
func ExampleScopeKey() {
	for _, parts := range [][3]string{
		{"seat", "21A", "2026-11-21T20:00"},
		{"seat", "21A/2026-11-21T20:00", ""},
		{"storage", "acme", ""},
	} {
		fmt.Println(budget.ScopeKey(parts[0], parts[1], parts[2]))
	}
	// Output:
	// seat/21A/2026-11-21T20:00
	// seat/21A%2F2026-11-21T20:00
	// storage/acme
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

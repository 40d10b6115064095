package leases_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/leases"
)

// A hot budget is spent from leases, inside transactions of the caller's.
func ExamplePool_Charge() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	pool, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "org/"}}})
	if err != nil {
		log.Fatal(err)
	}
	acme := budget.Charge{Scope: "org/acme", Amount: 5, Limits: []budget.Limit{budget.PerWindow(100_000, time.Hour)}}
	for range 1000 {
		err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			// … your own writes …
			_, err := pool.Charge(ctx, tx, acme)
			return err
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	if err := pool.Close(ctx); err != nil { // gives back unspent units
		log.Fatal(err)
	}
	usage, err := ledger.Usage(ctx, db, budget.Query{Scope: "org/acme", Window: time.Hour})
	fmt.Println(usage[0].Used, usage[0].Held, usage[0].Leased, err)
	// Output: 5000 0 0 <nil>
}

// A limit on something that writes nothing is decided from memory.
func ExamplePool_Allow() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	pool, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "search/"}}})
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close(ctx)
	search := budget.Charge{Scope: "search/203.0.113.7", Amount: 1, Limits: []budget.Limit{budget.PerWindow(3, time.Minute)}}
	for range 4 {
		fmt.Println(pool.Allow(ctx, search) == nil)
	}
	// Output:
	// true
	// true
	// true
	// false
}

// The statement of a hot budget: its leases have each spend, and the ledger has each charge without a lease.
func ExamplePool_History() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	pool, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "org/"}}})
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close(ctx)
	charge := func(actor string) (leased bool) {
		err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			receipt, err := pool.Charge(ctx, tx, budget.Charge{
				Scope: "org/acme", Amount: 5, Limits: []budget.Limit{budget.PerWindow(100_000, time.Hour)}, Note: budget.Note{Actor: actor},
			})
			if err == nil {
				leased = receipt.Entries[0].Lease != 0
			}
			return err
		})
		if err != nil {
			log.Fatal(err)
		}
		return leased
	}
	for range 100 {
		charge("user:ann")
		charge("user:ben")
	}
	for !charge("user:cat") { // the first few charges of a scope go to the ledger
	}

	spent := map[string]int64{}
	for lease, err := range pool.History(ctx, db, "org/acme") {
		if err != nil {
			log.Fatal(err)
		}
		for spend, err := range pool.Spends(ctx, db, lease.No) {
			if err != nil {
				log.Fatal(err)
			}
			spent[spend.Note.Actor] += spend.Amount
		}
	}
	fmt.Println("from leases:", spent["user:cat"])
	for entry, err := range ledger.Entries(ctx, db, "org/acme", budget.EntriesOptions{}) {
		if err != nil {
			log.Fatal(err)
		}
		if entry.Kind == "charge" { // a lease's own entries are holds and captures
			spent[entry.Note.Actor] += entry.Amount
		}
	}
	fmt.Println("in all:", spent["user:ann"], spent["user:ben"])
	// Output:
	// from leases: 5
	// in all: 500 500
}

// Limits that are decided from memory still say in each answer how much is left.
func ExamplePool_Receipt() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	pool, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{}}})
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close(ctx)
	limits := []budget.Limit{budget.PerWindow(3, time.Minute).Named("searches")}
	policies, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: limits})
	if err != nil {
		log.Fatal(err)
	}
	search := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		charge := budget.Charge{Scope: budget.ScopeKey("search", r.FormValue("user"), ""), Amount: 1, Limits: limits}
		if err := pool.Allow(r.Context(), charge); err != nil {
			policies.Write(w, err)
			return
		}
		policies.Show(w.Header(), pool.Receipt(charge))
	})
	for _, user := range []string{"ann", "ann", "ben"} {
		w := httptest.NewRecorder()
		search.ServeHTTP(w, httptest.NewRequest("GET", "/?user="+user, nil))
		fmt.Println(user, w.Code, w.Header().Get("RateLimit"))
	}
	// Output:
	// ann 200 "searches";r=2;t=60
	// ann 200 "searches";r=1;t=60
	// ben 200 "searches";r=2;t=60
}

// All requests of a process share the limit of an upstream service: Limiter saves looking for the limit each time.
// The Pool says how much of it is left.
func ExamplePool_Limiter() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	pool, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{}}})
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close(ctx)
	call := budget.Charge{Scope: "upstream", Amount: 1, Limits: []budget.Limit{budget.PerWindow(10, time.Minute)}}
	upstream, err := pool.Limiter(call)
	if err != nil {
		log.Fatal(err)
	}
	for _, batch := range []int64{4, 5, 2} {
		if err := upstream(ctx, batch); err != nil {
			fmt.Println("refused:", errors.Is(err, budget.ErrExceeded))
			continue
		}
		stands := pool.Receipt(call).Entries[0].Standings[0]
		fmt.Println("used", stands.Used, "left", stands.Available)
	}
	// Output:
	// used 4 left 6
	// used 9 left 1
	// refused: true
}

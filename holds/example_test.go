package holds_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// Two seats are held for five minutes, while somebody types a card number, and then
// sold.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	hold := func(holder string, seats int64) (h holds.Hold, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			h, err = book.Place(ctx, tx, holds.Placement{
				Holder: holder,
				TTL:    5 * time.Minute,
				Lines: []holds.Line{{
					Scope: budget.ScopeKey("seats", "hall 1", "2026-11-21T20:00"), Amount: seats,
					Limits: []budget.Limit{budget.Lifetime(3)}, // a capacity
				}},
			})
			return err
		})
		return h, err
	}

	ann, err := hold("ann", 2)
	check(err)
	fmt.Println(ann.State, "for", ann.Remaining())

	_, err = hold("ben", 2)
	var exceeded *budget.ExceededError
	if errors.As(err, &exceeded) {
		r := exceeded.Refusals[0]
		fmt.Printf("requested %d, available %d of %d, the next hold ends within 5m: %v\n",
			r.Requested, r.Available, r.Limit.Max, r.HoldDue <= 5*time.Minute)
	}

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// … the application's own order, in the same transaction …
		sold, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{ann.ID}, All: true, Holder: "ann", Entity: "order/7"})
		if err == nil {
			fmt.Println(sold[0].State, sold[0].Lines[0].Captured, "for", sold[0].Entity)
		}
		return err
	}))
	// Output:
	// held for 5m0s
	// requested 2, available 1 of 3, the next hold ends within 5m: true
	// captured 2 for order/7
}

// An estimate is held, the real usage is captured as it comes, and the rest is free again.
func ExampleBook_Capture() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	var job holds.Hold
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		job, err = book.Place(ctx, tx, holds.Placement{
			ID: "job-1", TTL: time.Hour,
			Lines: []holds.Line{{Scope: "gpu/acme", Amount: 100, Limits: []budget.Limit{budget.PerWindow(1_000, 24*time.Hour)}}},
		})
		return err
	}))
	used := func(seconds int64, keep bool, over holds.Over) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			hs, err := book.Capture(ctx, tx, holds.Capture{
				IDs: []string{job.ID}, Lines: []holds.Line{{Scope: "gpu/acme", Amount: seconds}}, Keep: keep, Over: over,
			})
			if err == nil {
				line := hs[0].Lines[0]
				fmt.Printf("%s: %d used, %d held\n", hs[0].State, line.Captured, line.Open)
			}
			return err
		})
		if err != nil {
			fmt.Println(err)
		}
	}
	used(30, true, holds.OverRefused)
	used(40, true, holds.OverRefused)
	used(45, false, holds.OverRefused)
	used(45, false, holds.OverAllowed) // it was used, so it is charged
	used(1, false, holds.OverRefused)
	// Output:
	// held: 30 used, 70 held
	// held: 70 used, 30 held
	// holds: the amount exceeds the open units: scope "gpu/acme": requested 45, held 30
	// captured: 115 used, 0 held
	// holds: the hold was captured: "job-1"
}

func exampleBook(cfg holds.Config) *holds.Book {
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := holds.New(ledger, cfg)
	check(err)
	return book
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// The capacity is in a table of the application. Both sides take the scope's lock
// first, so that it is not lowered between being read and being used.
func Example_capacity() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	ledger, err := budget.New(budget.Config{})
	check(err)
	_, err = pool.Exec(ctx, `create table rooms (name text primary key, beds int not null); insert into rooms values ('blue', 6)`)
	check(err)
	scope := budget.ScopeKey("room", "blue", "2026-11-21")

	reserve := func(beds int64) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := ledger.Lock(ctx, tx, scope); err != nil {
				return err
			}
			var capacity int64 // read after the lock: nobody can lower it now
			if err := tx.QueryRow(ctx, `select beds from rooms where name = 'blue'`).Scan(&capacity); err != nil {
				return err
			}
			_, err := book.Place(ctx, tx, holds.Placement{
				TTL:   time.Minute,
				Lines: []holds.Line{{Scope: scope, Amount: beds, Limits: []budget.Limit{budget.Lifetime(capacity)}}},
			})
			return err
		})
	}
	errInUse := errors.New("more than that are in use")
	resize := func(beds int64) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := ledger.Lock(ctx, tx, scope); err != nil {
				return err
			}
			usage, err := ledger.Usage(ctx, tx, budget.Query{Scope: scope})
			if err == nil && usage[0].Used+usage[0].Held > beds {
				err = errInUse
			}
			if err == nil {
				_, err = tx.Exec(ctx, `update rooms set beds = $1 where name = 'blue'`, beds)
			}
			return err
		})
	}

	fmt.Println("reserve 4:", reserve(4))
	fmt.Println("resize to 3:", resize(3))
	fmt.Println("resize to 5:", resize(5))
	fmt.Println("reserve 2 is refused:", errors.Is(reserve(2), budget.ErrExceeded))
	// Output:
	// reserve 4: <nil>
	// resize to 3: more than that are in use
	// resize to 5: <nil>
	// reserve 2 is refused: true
}

// A user name is claimed while somebody signs up, and confirmed in the transaction that
// makes the user. Names are normalised first: bytes are compared.
func ExampleBook_Claim() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	_, err := pool.Exec(ctx, `create table users (id bigint generated always as identity primary key, name text)`)
	check(err)
	key := func(name string) holds.Key { return holds.Key{Type: "user name", Value: strings.ToLower(name)} }
	claim := func(name, session string) (h holds.Hold, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			h, err = book.Claim(ctx, tx, holds.Claim{Key: key(name), Holder: session, TTL: 10 * time.Minute})
			return err
		})
		return h, err
	}

	first, err := claim("Ann", "session-1")
	check(err)
	again, err := claim("ann", "session-1")
	check(err)
	fmt.Println("again:", again.ID == first.ID, "created:", again.Created)
	_, err = claim("ann", "session-2")
	var taken *holds.TakenError
	fmt.Println("taken:", errors.As(err, &taken), "confirmed:", taken.Confirmed, "soon free:", taken.RetryAfter <= 10*time.Minute)

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		if err := tx.QueryRow(ctx, `insert into users (name) values ('Ann') returning id`).Scan(&id); err != nil {
			return err
		}
		_, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{first.ID}, All: true, Holder: "session-1", Entity: fmt.Sprint("user/", id)})
		return err
	}))
	_, err = claim("ann", "session-2")
	fmt.Println(err)
	claimed, err := book.Claimed(ctx, pool, "", key("ann"), key("ben"), key("cat"))
	check(err)
	fmt.Println("taken of three names:", len(claimed), "by", claimed[key("ann")].Entity)
	// Output:
	// again: true created: false
	// taken: true confirmed: false soon free: true
	// holds: the claim is taken: confirmed
	// taken of three names: 1 by user/1
}

// The live holds of a holder, newest first, a page at a time.
func ExampleBook_List() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for i, holder := range []string{"ann", "ann", "ben", "ann", "ann"} {
			_, err := book.Place(ctx, tx, holds.Placement{
				ID: fmt.Sprint("h", i+1), Holder: holder, TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}},
			})
			if err != nil {
				return err
			}
		}
		_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"h2"}, Holder: "ann"})
		return err
	}))

	filter := holds.Filter{Holder: "ann", State: holds.Held, Max: 2}
	for {
		page, err := book.List(ctx, pool, filter)
		check(err)
		for _, h := range page.Holds {
			fmt.Println(h.ID, h.State, "live:", h.Remaining() > 0)
		}
		if page.Next == "" {
			break
		}
		fmt.Println("next page")
		filter.After = page.Next
	}
	// Output:
	// h5 held live: true
	// h4 held live: true
	// next page
	// h1 held live: true
}

// Another holder's hold looks like none. Only the program's log says that there is one.
func ExampleIsOthers() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Place(ctx, tx, holds.Placement{ID: "h1", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		return err
	}))
	for _, id := range []string{"h1", "h2"} {
		_, err := book.Get(ctx, pool, "", id, "ben")
		fmt.Println(err, holds.IsOthers(err))
	}
	// Output:
	// holds: no such hold true
	// holds: no such hold false
}

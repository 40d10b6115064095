package holds_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// How many of the holds of a day were captured, given up or left to expire. Purged holds are not counted.
func Example_funnel() {
	ctx := context.Background()
	monday := time.Date(2026, 11, 23, 9, 0, 0, 0, time.UTC)
	pool, set, done := exampleDatabaseAt(monday)
	defer done()
	book := exampleBook(holds.Config{})
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for _, id := range []string{"a", "b", "c", "d"} {
			if _, err := book.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "concert", Amount: 1}}}); err != nil {
				return err
			}
		}
		if _, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{"a", "b"}, All: true}); err != nil {
			return err
		}
		_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"c"}})
		return err
	}))

	set(monday.Add(2 * time.Hour)) // nobody captured d, and nobody has swept
	var placed, converted, givenUp, abandoned int
	check(pool.QueryRow(ctx, `
		select count(*), count(*) filter (where state like 'captured%'), count(*) filter (where state = 'released'),
			count(*) filter (where state = 'expired')
		from metered.holds_words
		where tenant = $1 and placed_at >= $2 and placed_at < $3`,
		"", monday, monday.AddDate(0, 0, 1)).Scan(&placed, &converted, &givenUp, &abandoned))
	fmt.Printf("%d placed, %d converted, %d given up, %d abandoned\n", placed, converted, givenUp, abandoned)
	// Output: 4 placed, 2 converted, 1 given up, 1 abandoned
}

// All active claims of a type, and the state and version of one resource in one read.
func Example_resources() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book := exampleBook(holds.Config{})
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for _, key := range []holds.Key{{Type: "email", Value: "ann@example.com"}, {Type: "email", Value: "ben@example.com"}, {Type: "name", Value: "ann"}} {
			if _, err := book.Claim(ctx, tx, holds.Claim{Key: key, Holder: "ann", TTL: time.Hour}); err != nil {
				return err
			}
		}
		return nil
	}))

	var claims int
	check(pool.QueryRow(ctx, `
		select count(*) from metered.holds_words
		where starts_with(claim, 'claim/email%2F') and state in ('held', 'captured')`).Scan(&claims))
	fmt.Println("active claims of the type email:", claims)

	for _, value := range []string{"ann@example.com", "cyd@example.com"} {
		scope, err := holds.Key{Type: "email", Value: value}.Scope("")
		check(err)
		usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: scope})
		check(err)
		switch u := usage[0]; {
		case u.Held > 0:
			fmt.Println(value, "is reserved, version", u.Seq)
		case u.Used > 0:
			fmt.Println(value, "is confirmed, version", u.Seq)
		default:
			fmt.Println(value, "is available, version", u.Seq)
		}
	}
	// Output:
	// active claims of the type email: 2
	// ann@example.com is reserved, version 1
	// cyd@example.com is available, version 0
}

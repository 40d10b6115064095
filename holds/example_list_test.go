package holds_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
)

// What a holder holds now, newest first, a page at a time.
func ExampleBook_List() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{})
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for i, holder := range []string{"ann", "ann", "ben", "ann", "ann"} {
			_, err := book.Place(ctx, tx, holds.Request{
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
			fmt.Println(h.ID, h.State, "live:", h.Live())
		}
		if page.Next == 0 {
			break
		}
		fmt.Println("next page")
		filter.Before = page.Next
	}
	// Output:
	// h5 held live: true
	// h4 held live: true
	// next page
	// h1 held live: true
}

package holds_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// A process keeps in memory which rooms are held, loads that whenever it may have
// missed something, and follows the notices in between.
func ExampleBook_Listen() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{NotifyContent: true})
	write := func(fn func(tx pgx.Tx) error) { check(pgx.BeginFunc(ctx, pool, fn)) }
	place := func(id string) {
		write(func(tx pgx.Tx) error {
			_, err := book.Place(ctx, tx, holds.Request{ID: id, Holder: "ann", TTL: time.Minute, Lines: []holds.Line{{Scope: "room/" + id, Amount: 1}}})
			return err
		})
	}
	place("red") // before anybody listens

	held := map[string]bool{}
	enough := errors.New("enough")
	err := book.Listen(ctx, pool, holds.ListenOptions{}, func(ctx context.Context, n holds.Notice) error {
		switch {
		case n.Missed:
			page, err := book.List(ctx, pool, holds.Filter{State: holds.Held}) // and the pages after it
			if err != nil {
				return err
			}
			clear(held)
			for _, h := range page.Holds {
				held[h.ID] = true
			}
			fmt.Println("loaded", held)
			place("blue")
			write(func(tx pgx.Tx) error {
				_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"red"}, Note: budget.Note{Reason: "a day early"}})
				return err
			})
		case n.Kind == holds.EventPlaced:
			held[n.ID] = true
			fmt.Println(n.Kind, held, "by", n.Holder, n.Lines[0].Scope, n.Lines[0].Amount)
		case n.Kind == holds.EventReleased: // or EventExpired, which a Sweep tells
			delete(held, n.ID)
			fmt.Println(n.Kind, held, n.Note.Reason)
			return enough
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// loaded map[red:true]
	// placed map[blue:true red:true] by ann room/blue 1
	// released map[blue:true] a day early
	// enough
}

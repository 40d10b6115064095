package holds_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// A customer disputes a bill. The history of the hold has its state at each moment, and the actor of each change.
func ExampleRebuild() {
	ctx := context.Background()
	noon := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(noon)
	defer done()
	book := exampleBook(holds.Config{})
	gpu := func(seconds int64) []holds.Line { return []holds.Line{{Scope: "gpu/acme", Amount: seconds}} }
	note := func(actor string) budget.Note { return budget.Note{Actor: actor} }
	var placed holds.Hold
	for minute, act := range []func(tx pgx.Tx) error{
		func(tx pgx.Tx) (err error) {
			placed, err = book.Place(ctx, tx, holds.Placement{ID: "job-1", TTL: time.Hour, Lines: gpu(100), Note: note("user:ann")})
			return err
		},
		func(tx pgx.Tx) error {
			_, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{"job-1"}, Lines: gpu(30), Keep: true, Note: note("job:train")})
			return err
		},
		func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"job-1"}, Note: note("user:ben")})
			return err
		},
	} {
		setClock(noon.Add(time.Duration(minute) * time.Minute))
		check(pgx.BeginFunc(ctx, pool, act))
	}

	history, err := book.History(ctx, pool, "", "job-1", "")
	check(err)
	for i, event := range history {
		h, err := holds.Rebuild(holds.Hold{}, history[:i+1])
		check(err)
		fmt.Printf("%s %s: %s, %d used, %d held\n", h.Now.Format("15:04"), event.Note.Actor, h.State, h.Lines[0].Captured, h.Lines[0].Open)
	}

	// A copy that was kept since the hold was placed catches up in the same way.
	h, err := holds.Rebuild(placed, history) // skips the events that the copy has
	check(err)
	fmt.Printf("the copy, from version %d to %d: %s\n", placed.Version, h.Version, h.State)
	// Output:
	// 12:00 user:ann: held, 0 used, 100 held
	// 12:01 job:train: held, 30 used, 70 held
	// 12:02 user:ben: released, 30 used, 0 held
	// the copy, from version 1 to 3: released
}

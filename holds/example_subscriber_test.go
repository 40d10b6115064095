package holds_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// A subscriber writes each transition to an outbox, in the transaction that makes it: a
// row is there exactly if the transition is.
func ExampleSubscriber() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	_, err := pool.Exec(ctx, `create table outbox (id bigint generated always as identity primary key, hold text, version int, kind text)`)
	check(err)
	outbox := func(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
		_, err := tx.Exec(ctx, `insert into outbox (hold, version, kind) values ($1, $2, $3)`, t.Hold.ID, t.Hold.Version, t.Kind)
		return err
	}
	book := exampleBook(holds.Config{Subscribers: []holds.Subscriber{outbox}, MinTTL: time.Millisecond})
	place := func(tx pgx.Tx, id string, ttl time.Duration) error {
		_, err := book.Place(ctx, tx, holds.Request{ID: id, TTL: ttl, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		return err
	}

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return place(tx, "kept", time.Minute) }))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return place(tx, "short", time.Millisecond) }))
	tx, err := pool.Begin(ctx)
	check(err)
	check(place(tx, "rolled back", time.Minute))
	check(tx.Rollback(ctx))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"kept"}, Note: budget.Note{Reason: "changed their mind"}})
		return err
	}))
	time.Sleep(2 * time.Millisecond)
	_, err = book.Sweep(ctx, pool, holds.SweepOptions{}) // it tells what ended by time
	check(err)

	rows, err := pool.Query(ctx, `select hold, version, kind from outbox order by id`)
	check(err)
	var hold, kind string
	var version int
	_, err = pgx.ForEachRow(rows, []any{&hold, &version, &kind}, func() error {
		fmt.Println(hold, version, kind)
		return nil
	})
	check(err)
	// Output:
	// kept 1 placed
	// short 1 placed
	// kept 2 released
	// short 2 expired
}

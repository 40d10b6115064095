package holds_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
)

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
	owner, err := book.Claimed(ctx, pool, "", key("ann"))
	check(err)
	fmt.Println("it is", owner.Entity)
	// Output:
	// again: true created: false
	// taken: true confirmed: false soon free: true
	// holds: the claim is taken: confirmed
	// it is user/1
}

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
			_, err := book.Place(ctx, tx, holds.Request{
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

package sqlmetered_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/sqlmetered"
)

// A program that uses database/sql saves a document. The limit, the operation's id and its own row commit together.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	db := stdlib.OpenDBFromPool(pool) // one pool for both
	defer db.Close()
	_, err = db.Exec("create table documents (title text not null)")
	check(err)

	save := func(id, title string) (replayed bool, err error) {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return false, err
		}
		defer tx.Rollback()
		if _, err := tx.Exec("insert into documents values ($1)", title); err != nil {
			return false, err
		}
		out, err := sqlmetered.DoTx[any](ctx, client, tx, metered.Command{
			ID: id, Tenant: "user/ann", Name: "save", Input: title,
			Charges: []budget.Charge{{Scope: "documents/ann", Amount: 1, Limits: []budget.Limit{{Name: "daily", Max: 1, Window: 24 * time.Hour}}}},
		}, nil)
		if err != nil || out.Replayed { // saved before: the insert is rolled back
			return out.Replayed, err
		}
		return false, sqlmetered.Commit(tx)
	}
	for _, request := range [][2]string{{"1", "Plans"}, {"1", "Plans"}, {"2", "More plans"}} {
		replayed, err := save(request[0], request[1])
		fmt.Printf("%s: replayed %v, refused %v\n", request[1], replayed, errors.Is(err, budget.ErrExceeded))
	}
	var n int
	check(db.QueryRow("select count(*) from documents").Scan(&n))
	fmt.Println("documents:", n)
	// Output:
	// Plans: replayed false, refused false
	// Plans: replayed true, refused false
	// More plans: replayed false, refused true
	// documents: 1
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

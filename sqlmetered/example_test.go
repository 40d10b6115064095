package sqlmetered_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/sqlmetered"
)

// A program that uses database/sql saves a document. The limit, the operation's id and its own row commit together.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	db := sqlmetered.OpenDB(pool) // one pool for both
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

// A gateway reserves a request's greatest cost and settles the used part, each in the transaction that writes its own
// rows: by database/sql here, and by the *sql.Tx of an ORM in the same way.
func ExampleSettleTx() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	db := sqlmetered.OpenDB(pool)
	defer db.Close()
	_, err = db.Exec("create table requests (id text primary key, tokens bigint)")
	check(err)

	tx, err := db.BeginTx(ctx, nil)
	check(err)
	defer tx.Rollback()
	_, err = tx.Exec("insert into requests (id) values ('r-1')")
	check(err)
	session, err := sqlmetered.OpenTx[any](ctx, client, tx, metered.Reservation{
		ID: "r-1", Tenant: "user/ann", Name: "chat", Input: "a prompt",
		Lines: []holds.Line{{Scope: "tokens/ann", Amount: 1000, Limits: []budget.Limit{budget.PerWindow(5000, 24*time.Hour)}}},
	})
	check(err) // *budget.ExceededError: tx is usable
	defer session.Close()
	check(sqlmetered.Commit(tx))

	// The work, which takes session.Context(), has used 420 tokens.
	tx, err = db.BeginTx(ctx, nil)
	check(err)
	defer tx.Rollback()
	_, err = tx.Exec("update requests set tokens = 420 where id = 'r-1'")
	check(err)
	_, err = sqlmetered.SettleTx(ctx, session, tx, metered.Cost{Lines: []holds.Line{{Scope: "tokens/ann", Amount: 420}}}, nil)
	check(err)
	check(sqlmetered.Commit(tx))

	usage, err := client.Budget.Usage(ctx, pool, budget.Query{Scope: "tokens/ann"})
	check(err)
	fmt.Println("used", usage[0].Used, "held", usage[0].Held)
	// Output: used 420 held 0
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

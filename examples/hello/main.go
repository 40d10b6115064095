// Command hello is the example of the README: one command, sent twice, and one that the budget refuses.
//
//	DATABASE_URL=postgres://… go run ./examples/hello
//
// It makes the schema metered and the table notes in that database, and leaves them there. So at a second run request-1 is replayed from
// the first line on: the id runs once, whoever asks.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{}); err != nil {
		log.Fatal(err)
	}
	if _, err := pool.Exec(ctx, "create table if not exists notes (text text)"); err != nil {
		log.Fatal(err)
	}
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}

	// The client sends request-1 twice, and then request-2.
	for _, request := range []string{"request-1", "request-1", "request-2"} {
		out, err := metered.Do(ctx, client, metered.Command{
			ID:     request, // the same id runs once
			Tenant: "ann",   // the owner of the id: the signed-in user
			Charges: []budget.Charge{{
				Scope: "org/acme", Amount: 600, Limits: []budget.Limit{budget.PerWindow(1_000, time.Hour)},
			}},
		}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, err := tx.Exec(ctx, "insert into notes values ($1)", request) // your own writes
			return "saved", err
		})
		fmt.Printf("%s: %q replayed=%t code=%q\n", request, out.Result, out.Replayed, metered.Code(err))
	}
}

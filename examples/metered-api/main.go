// Command metered-api is an HTTP API of a computation that is billed by its actual cost.
//
//	go run ./examples/metered-api                           # shows it, and ends
//	go run ./examples/metered-api -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i 127.0.0.1:8080/tasks -H 'Authorization: Bearer key-of-ann' -d '{"number": 600851475143}'
//
// With -database, of the application's own, there can be any number of processes, and workers alone:
//
//	go run ./examples/metered-api -database postgres://… -listen 127.0.0.1:8080
//	go run ./examples/metered-api -database postgres://… -worker
//
// Read app.go, and http.go for its HTTP side. main.go runs it on a throwaway Postgres, or on that of DATABASE_URL in
// a database of its own that it drops at the end.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

// hourly is an account's limit. Held units count as spent until the actual cost is known.
var hourly = []budget.Limit{budget.PerWindow(2_000_000, time.Hour).Named("hourly")}

func main() {
	listen := flag.String("listen", "", "serve at this address instead of the demonstration")
	worker := flag.Bool("worker", false, "work only, without HTTP; needs -database")
	database := flag.String("database", "", "connection string of a database to use, and to keep")
	flag.Parse()
	opts := exampledb.Options{Jobs: true, SQL: tasksSQL, Use: *database}
	exampledb.With("metered-api", opts, func(ctx context.Context, db *exampledb.Database) error {
		a, err := newApp(db.Pool, hourly)
		if err != nil {
			return err
		}
		handler, err := a.handler()
		if err != nil {
			return err
		}
		if err := db.Work(ctx, a.river); err != nil {
			return err
		}
		switch {
		case *worker && *database == "":
			return errors.New("-worker needs -database")
		case *worker:
			fmt.Println("working")
			<-ctx.Done()
			return nil
		}
		return examplehttp.Run(ctx, *listen, handler, func(base string) {
			fmt.Printf("curl -i %s/tasks -H 'Authorization: Bearer key-of-ann' -d '{\"number\": 600851475143}'\n", base)
		}, func(ctx context.Context, base string) error {
			return show(ctx, os.Stdout, newClient(base, "key-of-ann"), a)
		})
	})
}

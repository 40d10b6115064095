// Command metered-api is an HTTP API of a computation that is billed by its actual cost.
//
//	go run ./examples/metered-api                           # shows it, and ends
//	go run ./examples/metered-api -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i 127.0.0.1:8080/tasks -H 'Authorization: Bearer key-of-ann' -d '{"number": 600851475143}'
//
// A request holds the largest cost of its work, and enqueues it. A River job does the work, and captures the actual
// cost together with the result. If it fails for good the hold is released. If its worker dies the job is tried
// again, and the work is charged once or not at all.
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
	"net/http"
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
	exampledb.Main("metered-api", func(ctx context.Context) error { return run(ctx, *listen, *worker, *database) })
}

func run(ctx context.Context, listen string, worker bool, database string) (err error) {
	pool, closeDB, err := exampledb.Use(ctx, database, "api", exampledb.Options{Jobs: true, SQL: tasksSQL})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeDB()) }()
	a, err := newApp(pool, hourly)
	if err != nil {
		return err
	}
	stopWork, err := exampledb.Work(ctx, a.river)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopWork()) }()
	switch {
	case worker && database == "":
		return errors.New("-worker needs -database")
	case worker:
		fmt.Println("working")
		<-ctx.Done()
		return nil
	case listen == "":
		return show(ctx, os.Stdout, a)
	}
	base, closed, err := a.serve(ctx, listen)
	if err != nil {
		return err
	}
	fmt.Printf("curl -i %s/tasks -H 'Authorization: Bearer key-of-ann' -d '{\"number\": 600851475143}'\n", base)
	return <-closed
}

// serve serves until ctx is done, and then finishes its requests.
func (a *app) serve(ctx context.Context, address string) (base string, closed <-chan error, err error) {
	handler, err := a.handler()
	if err != nil {
		return "", nil, err
	}
	return examplehttp.Serve(ctx, address, &http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
	})
}

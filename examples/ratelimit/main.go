// Command ratelimit is a public HTTP command, limited per client and for all clients together over several windows.
//
//	go run ./examples/ratelimit                           # shows what it does, and ends
//	go run ./examples/ratelimit -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i 127.0.0.1:8080/redeem -d '{"code": "WELCOME"}'
//	curl -i 127.0.0.1:8080/offers
//
// An attempt at a voucher is charged before it is looked at, and stays charged when it fails: guessing is what the limits
// are against. Answers say what is left (RateLimit), refusals when to come back (Retry-After) and why, and the number
// admitted in any window is exact, whatever the number of clients and processes. With -shadow the limits count and report
// what they would refuse, and let it pass. The offers are limited too: a look writes nothing, so its limit is decided from
// memory.
//
// What to read: service.go, the command and its HTTP side; offers.go, a limit from memory. main.go starts it, on a throwaway
// Postgres or, if DATABASE_URL is set, on that server in a database of its own that it drops at the end. What it takes
// from examples/internal for that is the only thing here that another module cannot import.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

// usual limits. A sliding window has no beginning: no second hour's attempts can be put right behind those of a first.
var usual = limits{
	Client: []budget.Limit{
		budget.PerWindow(10, time.Hour).Named("hourly"),
		budget.PerWindow(30, 24*time.Hour).Named("daily"),
	},
	All: []budget.Limit{
		budget.PerWindow(25, time.Hour).Named("all-hourly"),
		budget.PerWindow(400, 24*time.Hour).Named("all-daily"),
	},
}

func main() {
	listen := flag.String("listen", "", "serve at this address instead of showing what it does")
	shadow := flag.Bool("shadow", false, "with -listen: refuse nothing, report what would be refused")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once; the server's watchdog cleans up
	if err := run(ctx, *listen, *shadow); err != nil {
		fmt.Fprintln(os.Stderr, "ratelimit:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, listen string, shadow bool) (err error) {
	db, err := exampledb.Open(ctx, "ratelimit", exampledb.Options{SQL: vouchersSQL})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.Pool.Exec(ctx, `insert into vouchers values ('WELCOME', 500), ('SUMMER', 1000)`); err != nil {
		return err
	}
	if listen == "" {
		return show(ctx, os.Stdout, db.Pool)
	}
	s, err := newService(db.Pool, usual, shadow)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	base, closed, err := serve(ctx, listen, s)
	if err != nil {
		return err
	}
	fmt.Printf("redeem WELCOME or SUMMER:\ncurl -i %s/redeem -d '{\"code\": \"WELCOME\"}'\n", base)
	return <-closed
}

// serve serves until ctx is done, and then finishes what it has begun.
func serve(ctx context.Context, address string, s *service) (base string, closed <-chan error, err error) {
	return examplehttp.Serve(ctx, address, &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
	}, nil)
}

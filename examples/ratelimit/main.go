// Command ratelimit is a public HTTP command, limited per client and for all clients together over several windows.
//
//	go run ./examples/ratelimit                           # shows it, and ends
//	go run ./examples/ratelimit -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i 127.0.0.1:8080/redeem -d '{"code": "WELCOME"}'
//	curl -i 127.0.0.1:8080/offers
//
// An attempt at a voucher is charged before the look-up, and stays charged when it fails: the limits are against
// guessing. Answers show the units left (RateLimit), refusals also a time to come back (Retry-After) and a reason.
// The number of admitted attempts is exact in any window, for any number of clients and processes. The offers are
// limited too: a look writes nothing, so its limit is decided from memory.
//
// Read service.go, the command and its HTTP side, and offers.go, a limit from memory. main.go runs it on a throwaway
// Postgres, or on that of DATABASE_URL in a database of its own that it drops at the end.
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
	listen := flag.String("listen", "", "serve at this address instead of the demonstration")
	flag.Parse()
	exampledb.Main("ratelimit", func(ctx context.Context) error { return run(ctx, *listen) })
}

func run(ctx context.Context, listen string) (err error) {
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
	s, err := newService(db.Pool, usual)
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

// serve serves until ctx is done, and then finishes its requests.
func serve(ctx context.Context, address string, s *service) (base string, closed <-chan error, err error) {
	return examplehttp.Serve(ctx, address, &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
	})
}

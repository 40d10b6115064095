// Command ratelimit is a public HTTP command, limited per client and for all clients together over several windows.
//
//	go run ./examples/ratelimit                           # shows it, and ends
//	go run ./examples/ratelimit -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i 127.0.0.1:8080/redeem -d '{"code": "WELCOME"}'
//	curl -i 127.0.0.1:8080/offers
//
// Read service.go, the command and its HTTP side, and offers.go, a limit from memory. main.go runs it on a throwaway
// Postgres, or on that of DATABASE_URL in a database of its own that it drops at the end.
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
	exampledb.With("ratelimit", exampledb.Options{SQL: vouchersSQL}, func(ctx context.Context, db *exampledb.Database) (err error) {
		if _, err := db.Pool.Exec(ctx, `insert into vouchers values ('WELCOME', 500), ('SUMMER', 1000)`); err != nil {
			return err
		}
		s, err := newService(db.Pool, usual)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.close()) }()
		return examplehttp.Run(ctx, *listen, s.handler(), func(base string) {
			fmt.Printf("redeem WELCOME or SUMMER:\ncurl -i %s/redeem -d '{\"code\": \"WELCOME\"}'\n", base)
		}, func(ctx context.Context, base string) error { return show(ctx, os.Stdout, base, s, db.Pool) })
	})
}

// Command gateway meters a streaming model server: it holds the most that a request may cost, and settles the actual
// cost.
//
//	go run ./examples/gateway     # then follow its output
//
// With -database, of the application's own, there can be any number of processes:
//
//	go run ./examples/gateway -database postgres://… -model http://… -listen 127.0.0.1:8081
//
// Read meter.go first, then gateway.go, the handler of a request. model.go is the stand-in for the model. main.go
// runs it on a throwaway Postgres, or on that of DATABASE_URL in a database of its own that it drops at the end.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/maintain"
)

func main() {
	var cfg config
	listen := flag.String("listen", "127.0.0.1:8080", "the address to serve at")
	database := flag.String("database", "", "connection string of a database to use, and to keep")
	flag.StringVar(&cfg.model, "model", "", "the address of the model's server; defaults to a stand-in")
	flag.DurationVar(&cfg.ttl, "ttl", 15*time.Second, "how long a request of a gateway that died keeps its hold")
	flag.Parse()
	opts := exampledb.Options{SQL: gatewaySQL, Use: *database}
	exampledb.With("gateway", opts, func(ctx context.Context, db *exampledb.Database) error {
		if *database == "" {
			if _, err := db.Pool.Exec(ctx, seedSQL); err != nil { // its secrets are known
				return err
			}
		}
		cfg.seeded = *database == ""
		return run(ctx, *listen, db.Pool, cfg)
	})
}

func run(ctx context.Context, listen string, pool *pgxpool.Pool, cfg config) (err error) {
	if cfg.model == "" {
		stand := &http.Server{Handler: newModel(50 * time.Millisecond).handler()}
		if cfg.model, _, err = examplehttp.Serve(ctx, "127.0.0.1:0", stand); err != nil {
			return err
		}
	}
	g, err := newGateway(pool, cfg)
	if err != nil {
		return err
	}
	exampledb.Every(ctx, cfg.ttl, func(ctx context.Context) error { // expired holds and lots have ended without it
		parts := maintain.Parts{Ledger: g.metered.Budget, Holds: g.metered.Holds, Wallets: g.wallet}
		_, err := maintain.Run(ctx, pool, parts, maintain.Policy{NoPurges: true})
		return err
	})
	server := &http.Server{Handler: g.handler(), ReadHeaderTimeout: 5 * time.Second}
	base, closed, err := examplehttp.Serve(ctx, listen, server)
	if err != nil {
		return err
	}
	if !cfg.seeded {
		fmt.Printf("%s/v1/chat/completions takes the keys of its database: accounts.go says how to make some\n", base)
		return <-closed
	}
	fmt.Printf(`curl -i %[1]s/v1/credit -H 'Authorization: Bearer admin-of-acme' -d '{"id": "payment-1", "amount": 5000000}'
curl -N %[1]s/v1/chat/completions -H 'Authorization: Bearer key-of-ann' -d '{"model": "small", "messages": [{"role": "user", "content": "How is a stream metered?"}]}'
curl %[1]s/v1/usage -H 'Authorization: Bearer key-of-ann'
`, base)
	return <-closed
}

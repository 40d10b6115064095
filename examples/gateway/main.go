// Command gateway meters a streaming model server: it holds the most that a request may cost, and settles the actual
// cost.
//
//	go run ./examples/gateway     # then follow its output
//
// An organisation, its teams, their users and their keys each have limits of their own: prepaid credit, a budget of a
// month in the customer's time zone, tokens and requests per minute. A request holds units of all of them. Its stream
// is passed on, and the model's count is captured together with the record of the request. A client that hangs up
// pays for the part that it got. A killed gateway leaves nothing held.
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
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

func main() {
	var cfg config
	listen := flag.String("listen", "127.0.0.1:8080", "the address to serve at")
	database := flag.String("database", "", "connection string of a database to use, and to keep")
	flag.StringVar(&cfg.model, "model", "", "the address of the model's server; defaults to a stand-in")
	flag.DurationVar(&cfg.ttl, "ttl", 15*time.Second, "how long a request of a gateway that died keeps its hold")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once, and the server's watchdog cleans up
	if err := run(ctx, *listen, *database, cfg); err != nil {
		fmt.Fprintln(os.Stderr, "gateway:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, listen, database string, cfg config) (err error) {
	pool, closeDB, err := openDatabase(ctx, database)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeDB()) }()
	if cfg.model == "" {
		stand := &http.Server{Handler: newModel(50 * time.Millisecond).handler()}
		if cfg.model, _, err = examplehttp.Serve(ctx, "127.0.0.1:0", stand, nil); err != nil {
			return err
		}
	}
	g, err := newGateway(pool, cfg)
	if err != nil {
		return err
	}
	if database == "" {
		if _, err := pool.Exec(ctx, seedSQL); err != nil { // its secrets are known
			return err
		}
	}
	if err := g.river.Start(context.WithoutCancel(ctx)); err != nil { // stopped below, also after Ctrl-C
		return err
	}
	defer func() {
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err = errors.Join(err, g.river.StopAndCancel(stopping))
	}()
	base, closed, err := g.serve(ctx, listen)
	if err != nil {
		return err
	}
	fmt.Printf(`curl -i %[1]s/v1/credit -H 'Authorization: Bearer admin-of-acme' -d '{"id": "payment-1", "amount": 5000000}'
curl -N %[1]s/v1/chat/completions -H 'Authorization: Bearer key-of-ann' -d '{"model": "small", "messages": [{"role": "user", "content": "How is a stream metered?"}]}'
curl %[1]s/v1/usage -H 'Authorization: Bearer key-of-ann'
curl '%[1]s/v1/invoice?month=%[2]s' -H 'Authorization: Bearer admin-of-acme'
or open %[1]s and enter key-of-ann
`, base, time.Now().Format("2006-01"))
	return <-closed
}

// serve serves until ctx is done, and then finishes the streams that have begun, for ten seconds.
func (g *gateway) serve(ctx context.Context, address string) (base string, closed <-chan error, err error) {
	server := &http.Server{Handler: g.handler(), ReadHeaderTimeout: 5 * time.Second}
	server.RegisterOnShutdown(func() { close(g.closing) }) // the page would never end by itself
	return examplehttp.Serve(ctx, address, server, nil)
}

// openDatabase opens the database, or one of the program's own.
func openDatabase(ctx context.Context, database string) (*pgxpool.Pool, func() error, error) {
	if database == "" {
		db, err := exampledb.Open(ctx, "gateway", exampledb.Options{Jobs: true, SQL: gatewaySQL})
		if err != nil {
			return nil, nil, err
		}
		return db.Pool, db.Close, nil
	}
	poolConfig, err := pgxpool.ParseConfig(database)
	if err != nil {
		return nil, nil, err
	}
	poolConfig.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, nil, err
	}
	if _, err = metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err == nil {
		_, err = pool.Exec(ctx, gatewaySQL)
	}
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return pool, func() error { return exampledb.ClosePool(pool, exampledb.DefaultCloseTimeout) }, nil
}

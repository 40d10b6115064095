// Command seats sells the seats of a hall: a map that changes live in the browser, holds of five minutes with a
// countdown, a checkout of all held seats, a box office that blocks seats, and a manager who sets the sale.
//
//	go run ./examples/seats                             # then open http://127.0.0.1:8080
//	go run ./examples/seats -listen 127.0.0.1:8081      # a second process, with the DATABASE_URL that the first prints
//
// Any number of processes serve one database. Each may end at any time, and none knows anything that the database
// does not.
//
// Read hold.go, the command behind a click, and checkout.go, which pays for held seats. event.go and block.go decide
// which seats are for sale. projection.go and live.go lead from the library's transitions to the browsers. README.md
// lists the guarantees. main.go runs it on the database of DATABASE_URL or on a throwaway Postgres.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/holds"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "the address to serve at")
	seats := flag.Int("seats", 500, "how many seats the hall gets, when the database is set up")
	cfg := usual
	flag.DurationVar(&cfg.holdFor, "hold", cfg.holdFor, "how long a seat is held")
	flag.DurationVar(&cfg.payTakes, "pay", cfg.payTakes, "how long the pretended payment takes")
	flag.Parse()
	exampledb.Main("seats", func(ctx context.Context) error { return run(ctx, *listen, *seats, cfg) })
}

func run(ctx context.Context, listen string, seats int, cfg config) (err error) {
	connString, throwaway, stop, err := exampledb.Server(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	pool, closePool, err := exampledb.Use(ctx, connString, "seats", exampledb.Options{Jobs: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closePool()) }()
	if err := setUp(ctx, pool, seats); err != nil {
		return err
	}
	a, err := newApp(pool, cfg)
	if err != nil {
		return err
	}
	// Its own end comes after that of the last request, also after Ctrl-C.
	if err := a.start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	exampledb.Every(ctx, 30*time.Second, func(ctx context.Context) error { // announces ends that no cleanup job did
		_, err := a.metered.Holds.Sweep(ctx, pool, holds.SweepOptions{})
		return err
	})
	base, closed, err := serve(ctx, listen, a)
	if err != nil {
		return err
	}
	fmt.Printf("open %s\n", base)
	if throwaway {
		fmt.Printf("a second process: DATABASE_URL='%s' go run ./examples/seats -listen 127.0.0.1:8081\n", connString)
	}
	return <-closed
}

// serve serves until ctx is done, and then finishes its requests.
func serve(ctx context.Context, address string, a *app) (base string, closed <-chan error, err error) {
	server := &http.Server{
		Handler: a.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
		ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
	server.RegisterOnShutdown(a.live.close) // the streams would never end by themselves
	return examplehttp.Serve(ctx, address, server)
}

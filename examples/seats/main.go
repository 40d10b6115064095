// Command seats sells the seats of a hall: a map that changes live in the browser, holds of five minutes with a
// countdown, a checkout of all held seats, a box office that blocks seats, and a manager who sets the sale.
//
//	go run ./examples/seats                             # then open http://127.0.0.1:8080
//	go run ./examples/seats -listen 127.0.0.1:8081      # a second process, with the DATABASE_URL that the first prints
//
// Any number of processes serve one database. Each may end at any time, and none knows anything that the database
// does not.
//
// Read hold.go, the command behind a click, and then README.md. main.go runs it on the database of DATABASE_URL or on a
// throwaway Postgres.
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/holds"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "the address to serve at")
	cfg := usual
	flag.DurationVar(&cfg.holdFor, "hold", cfg.holdFor, "how long a seat is held")
	flag.DurationVar(&cfg.payTakes, "pay", cfg.payTakes, "how long the pretended payment takes")
	flag.Parse()
	exampledb.With("seats", exampledb.Options{Jobs: true, Shared: true}, func(ctx context.Context, db *exampledb.Database) error {
		return run(ctx, db, *listen, cfg)
	})
}

func run(ctx context.Context, db *exampledb.Database, listen string, cfg config) error {
	if err := setUp(ctx, db.Pool); err != nil {
		return err
	}
	a, err := newApp(db.Pool, cfg)
	if err != nil {
		return err
	}
	if err := db.Work(ctx, a.river); err != nil { // the cleanup jobs
		return err
	}
	a.start(context.WithoutCancel(ctx)) // its own end comes after that of the last request, also after Ctrl-C
	defer a.stop()
	exampledb.Every(ctx, 30*time.Second, func(ctx context.Context) error { // announces ends that no cleanup job did
		_, err := a.metered.Holds.Sweep(ctx, db.Pool, holds.SweepOptions{})
		return err
	})
	server := &http.Server{
		Handler: a.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
		ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
	server.RegisterOnShutdown(a.live.close) // the streams would never end by themselves
	base, closed, err := examplehttp.Serve(ctx, listen, server)
	if err != nil {
		return err
	}
	fmt.Printf("open %s\n", base)
	if db.Throwaway() {
		fmt.Printf("a second process: DATABASE_URL='%s' go run ./examples/seats -listen 127.0.0.1:8081\n", db.ConnString)
	}
	return <-closed
}

//go:embed schema.sql
var schemaSQL string

//go:embed demo.sql
var demoSQL string

// setUpLock is held by the process that sets the database up.
const setUpLock = 7_328_321

// setUp makes the application's tables, and a hall to try, if they are missing.
func setUp(ctx context.Context, pool *pgxpool.Pool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock($1)`, setUpLock); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, schemaSQL); err != nil {
			return err
		}
		var filled bool
		if err := tx.QueryRow(ctx, `select exists (select from hall.organisations)`).Scan(&filled); err != nil || filled {
			return err
		}
		_, err := tx.Exec(ctx, demoSQL)
		return err
	})
}

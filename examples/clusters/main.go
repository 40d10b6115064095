// Command clusters sells one budget from two Postgres clusters, kills one of them (-9), brings it back, and shows
// that the sums agree.
//
//	go run ./examples/clusters
//
// Read sale.go. main.go starts two throwaway Postgres servers, and River workers on both.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases/carvejobs"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once, and the servers' watchdogs clean up
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "clusters:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer) (err error) {
	s := &sale{out: out, pools: map[string]*pgxpool.Pool{}, clients: map[string]*metered.Client{}}
	var us *exampledb.Database
	workers, workersOf := river.NewWorkers(), map[string]*river.Client[pgx.Tx]{}
	for _, name := range []string{"eu", "us"} {
		db, err := exampledb.Open(ctx, "clusters", exampledb.Options{Jobs: true, Durable: true, Private: true})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, db.Close()) }()
		us = db // the last one
		workersOf[name], err = river.NewClient(riverpgxv5.New(db.Pool), &river.Config{
			Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
			FetchPollInterval: 100 * time.Millisecond, Plugins: []rivertype.Plugin{jobs.Plugin()},
			Logger: slog.New(slog.DiscardHandler), // a server is killed here, of which River would speak
		})
		if err != nil {
			return err
		}
		if s.clients[name], err = metered.New(db.Pool, metered.Config{River: workersOf[name]}); err != nil {
			return err
		}
		s.pools[name] = db.Pool
	}
	if s.clusters, err = carvejobs.New(s.clients, carvejobs.Config{RetryAfter: 100 * time.Millisecond}); err != nil {
		return err
	}
	s.clusters.AddWorkers(workers)
	for _, w := range workersOf {
		if err := w.Start(ctx); err != nil {
			return err
		}
		defer func() {
			stopping, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			err = errors.Join(err, w.StopAndCancel(stopping))
		}()
	}
	return s.run(ctx, us.Crash, us.Recover)
}

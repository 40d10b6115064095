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
	"io"
	"log/slog"
	"os"
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
	exampledb.Main("clusters", func(ctx context.Context) error { return run(ctx, os.Stdout) })
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
		stop, failed := exampledb.Work(ctx, w)
		if failed != nil {
			return failed
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	return s.run(ctx, us.Crash, us.Recover)
}

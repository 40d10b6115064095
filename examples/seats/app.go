package main

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
)

// config is a process's settings.
type config struct {
	holdFor  time.Duration // how long a seat is held
	payTakes time.Duration // by the pretended payment

	// refresh is how often the map is read where nothing is heard of it.
	refresh time.Duration
}

var usual = config{holdFor: 5 * time.Minute, payTakes: 1500 * time.Millisecond, refresh: time.Second}

// app is one process of the application.
type app struct {
	cfg      config
	pool     *pgxpool.Pool
	river    *river.Client[pgx.Tx]
	metered  *metered.Client
	payments payments
	live     *live

	background sync.WaitGroup
	cancel     context.CancelFunc
}

func newApp(pool *pgxpool.Pool, cfg config) (*app, error) {
	a := &app{cfg: cfg, pool: pool, payments: pretended{cfg.payTakes}}
	a.live = newLive(cfg.refresh, a.readMap)
	workers := river.NewWorkers()
	var err error
	a.river, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
		Workers: workers,
		Logger:  slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return nil, err
	}
	a.metered, err = metered.New(pool, metered.Config{
		River: a.river,
		Holds: holds.Config{MaxTTL: max(cfg.holdFor, time.Hour), Subscribers: []holds.Subscriber{project}, Notify: true},
	})
	if err != nil {
		return nil, err
	}
	river.AddWorker(workers, jobs.NewCleanupWorker(a.pool, a.metered.Holds))
	return a, nil
}

// start begins to listen for changes, which the map shows.
func (a *app) start(ctx context.Context) {
	ctx, a.cancel = context.WithCancel(ctx)
	a.background.Go(func() { a.listen(ctx) })
}

func (a *app) stop() {
	a.cancel()
	a.live.close()
	a.background.Wait()
}

// listen has the map read anew when a hold changes, whichever process changed it.
func (a *app) listen(ctx context.Context) {
	err := a.metered.Holds.Listen(ctx, a.pool, holds.ListenOptions{
		OnError: func(err error) { slog.Warn("not listening", "error", err) },
	}, func(_ context.Context, n holds.Notice) error {
		a.live.touch(n.Tenant) // of all, if some were missed
		return nil
	})
	if ctx.Err() == nil {
		slog.Error("listening has ended", "error", err) // the map is still read once in a while
	}
}

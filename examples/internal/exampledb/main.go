package exampledb

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// Main runs an example until it ends, or Ctrl-C ends ctx. It exits with 1 if the example fails.
func Main(program string, run func(ctx context.Context) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once, and the server's watchdog cleans up
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, program+":", err)
		os.Exit(1)
	}
}

// Use is Open, or with a connString a pool on that database, which is migrated and kept. Call closeDB in the end.
func Use(ctx context.Context, connString, program string, opts Options) (pool *pgxpool.Pool, closeDB func() error, err error) {
	if connString == "" {
		db, err := Open(ctx, program, opts)
		if err != nil {
			return nil, nil, err
		}
		return db.Pool, db.Close, nil
	}
	if pool, err = newPool(ctx, connString, opts.MaxConns); err != nil {
		return nil, nil, err
	}
	if err := fill(ctx, pool, opts); err != nil {
		pool.Close()
		return nil, nil, err
	}
	return pool, func() error { return ClosePool(pool) }, nil
}

func newPool(ctx context.Context, connString string, maxConns int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(connString)
	if err != nil {
		return nil, err
	}
	if config.MaxConns = maxConns; maxConns <= 0 {
		config.MaxConns = 16
	}
	return pgxpool.NewWithConfig(ctx, config)
}

func fill(ctx context.Context, pool *pgxpool.Pool, opts Options) error {
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: opts.Jobs}); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, opts.SQL)
	return err
}

// Worker is a River client.
type Worker interface {
	Start(ctx context.Context) error
	StopAndCancel(ctx context.Context) error
}

// Work starts a worker. Ctrl-C does not end it, but stop does, within 10 s.
func Work(ctx context.Context, w Worker) (stop func() error, err error) {
	if err := w.Start(context.WithoutCancel(ctx)); err != nil {
		return nil, fmt.Errorf("starting River's workers: %w", err)
	}
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return w.StopAndCancel(ctx)
	}, nil
}

// Every calls f now and then until ctx is done, and logs its errors.
func Every(ctx context.Context, interval time.Duration, f func(context.Context) error) {
	go func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-tick.C:
				if err := f(ctx); err != nil && ctx.Err() == nil {
					slog.ErrorContext(ctx, "now and then", "error", err)
				}
			}
		}
	}()
}

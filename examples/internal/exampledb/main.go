package exampledb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/pgmetered/metered/budget"
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

// With is Main for an example with one database.
func With(program string, opts Options, run func(ctx context.Context, db *Database) error) {
	Main(program, func(ctx context.Context) (err error) {
		db, err := Open(ctx, program, opts)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, db.Close()) }()
		return run(ctx, db)
	})
}

// worker is a River client.
type worker interface {
	Start(ctx context.Context) error
	StopAndCancel(ctx context.Context) error
}

// Work starts a worker. Ctrl-C does not end it, but Close does.
func (d *Database) Work(ctx context.Context, w worker) error {
	if err := w.Start(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("starting River's workers: %w", err)
	}
	d.workers = append(d.workers, w)
	return nil
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

// Await calls f every 20 ms until it is done, fails, or ctx is.
func Await(ctx context.Context, f func() (done bool, err error)) error {
	for {
		if done, err := f(); done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Admitted calls f n times at the same time. It counts calls that were admitted and calls that limits refused, and joins
// other errors. A call that waited too long for its turn (budget.ErrBusy) did nothing, and is made again, as a client would.
func Admitted(n int, f func(i int) error) (admitted, refused int, err error) {
	patient := func(i int) error {
		for {
			if err := f(i); !errors.Is(err, budget.ErrBusy) {
				return err
			}
		}
	}
	for _, e := range AtOnce(n, patient) {
		switch {
		case e == nil:
			admitted++
		case errors.Is(e, budget.ErrExceeded):
			refused++
		default:
			err = errors.Join(err, e)
		}
	}
	return admitted, refused, err
}

// AtOnce calls f n times at the same time, and returns the results in order.
func AtOnce[R any](n int, f func(i int) R) []R {
	results, start := make([]R, n), make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-start
			results[i] = f(i)
		})
	}
	close(start)
	wg.Wait()
	return results
}

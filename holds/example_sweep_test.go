package holds_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// SweepHolds is the job of a periodic sweep.
type SweepHolds struct{}

func (SweepHolds) Kind() string { return "sweep_holds" }

// SweepWorker sweeps.
type SweepWorker struct {
	river.WorkerDefaults[SweepHolds]
	Book   *holds.Book
	Pool   *pgxpool.Pool
	Report func(holds.SweepReport)
}

func (w *SweepWorker) Work(ctx context.Context, _ *river.Job[SweepHolds]) error {
	report, err := w.Book.Sweep(ctx, w.Pool, holds.SweepOptions{})
	w.Report(report) // of what was swept also if there is an error
	return err
}

// Where River runs anyway, a periodic job sweeps: its leader enqueues one every so
// often, whatever the number of processes.
func ExampleBook_Sweep_river() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{MinTTL: time.Millisecond})
	placeShort(ctx, pool, book)

	reports := make(chan holds.SweepReport, 1)
	workers := river.NewWorkers()
	river.AddWorker(workers, &SweepWorker{Book: book, Pool: pool, Report: func(r holds.SweepReport) { reports <- r }})
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}},
		Workers: workers,
		Logger:  slog.New(slog.DiscardHandler), // for this example, which ends while the enqueuer may be at work
		PeriodicJobs: []*river.PeriodicJob{river.NewPeriodicJob(
			river.PeriodicInterval(10*time.Second),
			func() (river.JobArgs, *river.InsertOpts) { return SweepHolds{}, &river.InsertOpts{MaxAttempts: 1} }, // the next one is soon
			&river.PeriodicJobOpts{RunOnStart: true},
		)},
	})
	check(err)
	check(client.Start(ctx))
	defer func() { _ = client.Stop(ctx) }()

	report := <-reports
	fmt.Println("expired:", report.Expired, "failed:", report.Failed)
	// Output:
	// expired: 1 failed: 0
}

// Without River, a goroutine does: in one process or in all of them.
func ExampleBook_Sweep_ticker() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{MinTTL: time.Millisecond})
	placeShort(ctx, pool, book)

	sweepEvery := func(ctx context.Context, interval time.Duration, report func(holds.SweepReport, error)) {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				r, err := book.Sweep(ctx, pool, holds.SweepOptions{})
				if ctx.Err() != nil {
					return
				}
				report(r, err)
			}
		}
	}

	ctx, stop := context.WithCancel(ctx)
	var sweeper sync.WaitGroup
	sweeper.Go(func() {
		sweepEvery(ctx, 10*time.Millisecond, func(r holds.SweepReport, err error) { // every 10 seconds, say
			check(err)
			if r.Expired > 0 {
				fmt.Println("expired:", r.Expired, "in batches:", r.Batches)
				stop()
			}
		})
	})
	sweeper.Wait()
	// Output:
	// expired: 1 in batches: 1
}

// Or a command, which cron runs every minute.
func ExampleBook_Sweep_cron() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	placeShort(ctx, pool, exampleBook(holds.Config{MinTTL: time.Millisecond}))

	// func main() { os.Exit(sweepCommand(os.Getenv("DATABASE_URL"), os.Stdout)) }
	fmt.Println("exit code", sweepCommand(pool.Config().ConnString(), os.Stdout))
	// Output:
	// expired 1, skipped 0, failed 0
	// exit code 0
}

func sweepCommand(databaseURL string, out io.Writer) (exitCode int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 50*time.Second) // before cron starts the next
	defer cancel()
	err := func() error {
		pool, err := pgxpool.New(ctx, databaseURL)
		if err != nil {
			return err
		}
		defer pool.Close()
		ledger, err := budget.New(budget.Config{})
		if err != nil {
			return err
		}
		book, err := holds.New(ledger, holds.Config{}) // with the Subscribers of the application
		if err != nil {
			return err
		}
		report, err := book.Sweep(ctx, pool, holds.SweepOptions{})
		_, _ = fmt.Fprintf(out, "expired %d, skipped %d, failed %d\n", report.Expired, report.Skipped, report.Failed)
		return err
	}()
	if err != nil {
		_, _ = fmt.Fprintln(out, err)
		return 1
	}
	return 0
}

// placeShort places a hold whose time is over when it returns.
func placeShort(ctx context.Context, pool *pgxpool.Pool, book *holds.Book) {
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Place(ctx, tx, holds.Request{TTL: time.Millisecond, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		return err
	}))
	time.Sleep(2 * time.Millisecond)
}

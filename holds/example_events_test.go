package holds_test

import (
	"context"
	"errors"
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

// A process keeps in memory which rooms are held, loads that whenever it may have
// missed something, and follows the notices in between.
func ExampleBook_Listen() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{NotifyContent: true})
	write := func(fn func(tx pgx.Tx) error) { check(pgx.BeginFunc(ctx, pool, fn)) }
	place := func(id string) {
		write(func(tx pgx.Tx) error {
			_, err := book.Place(ctx, tx, holds.Placement{ID: id, Holder: "ann", TTL: time.Minute, Lines: []holds.Line{{Scope: "room/" + id, Amount: 1}}})
			return err
		})
	}
	place("red") // before anybody listens

	held := map[string]bool{}
	enough := errors.New("enough")
	err := book.Listen(ctx, pool, holds.ListenOptions{}, func(ctx context.Context, n holds.Notice) error {
		switch {
		case n.Missed:
			page, err := book.List(ctx, pool, holds.Filter{State: holds.Held}) // and the pages after it
			if err != nil {
				return err
			}
			clear(held)
			for _, h := range page.Holds {
				held[h.ID] = true
			}
			fmt.Println("loaded", held)
			place("blue")
			write(func(tx pgx.Tx) error {
				_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"red"}, Note: budget.Note{Reason: "a day early"}})
				return err
			})
		case n.Kind == holds.EventPlaced:
			held[n.ID] = true
			fmt.Println(n.Kind, held, "by", n.Holder, n.Lines[0].Scope, n.Lines[0].Amount)
		case n.Kind == holds.EventReleased: // or EventExpired, from a Sweep
			delete(held, n.ID)
			fmt.Println(n.Kind, held, n.Note.Reason)
			return enough
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// loaded map[red:true]
	// placed map[blue:true red:true] by ann room/blue 1
	// released map[blue:true] a day early
	// enough
}

// A connection that listens for other things can listen for holds as well. A payload only says that something has
// changed. Use Listen to get the change itself.
func ExampleBook_Channel() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	book := exampleBook(holds.Config{Notify: true})
	conn, err := pool.Acquire(ctx)
	check(err)
	defer conn.Release()
	for _, channel := range []string{book.Channel(), "settings"} {
		_, err = conn.Exec(ctx, `listen `+pgx.Identifier{channel}.Sanitize())
		check(err)
	}

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { // somewhere else
		_, err := book.Place(ctx, tx, holds.Placement{ID: "h1", TTL: time.Minute, Lines: []holds.Line{{Scope: "room/red", Amount: 1}}})
		return err
	}))
	note, err := conn.Conn().WaitForNotification(ctx)
	check(err)
	switch note.Channel {
	case book.Channel():
		page, err := book.List(ctx, conn, holds.Filter{State: holds.Held})
		check(err)
		fmt.Println(note.Channel, "held:", len(page.Holds))
	case "settings":
		// … your own …
	}
	// Output: metered_holds held: 1
}

// A subscriber writes each transition to an outbox, in the transaction that makes it: a
// row is there exactly if the transition is.
func ExampleSubscriber() {
	ctx := context.Background()
	noon := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(noon)
	defer done()
	_, err := pool.Exec(ctx, `create table outbox (id bigint generated always as identity primary key, hold text, version int, kind text)`)
	check(err)
	outbox := func(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
		_, err := tx.Exec(ctx, `insert into outbox (hold, version, kind) values ($1, $2, $3)`, t.Hold.ID, t.Hold.Version, t.Kind)
		return err
	}
	book := exampleBook(holds.Config{Subscribers: []holds.Subscriber{outbox}})
	place := func(tx pgx.Tx, id string, ttl time.Duration) error {
		_, err := book.Place(ctx, tx, holds.Placement{ID: id, TTL: ttl, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		return err
	}

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return place(tx, "kept", time.Hour) }))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return place(tx, "short", time.Minute) }))
	tx, err := pool.Begin(ctx)
	check(err)
	check(place(tx, "rolled back", time.Hour))
	check(tx.Rollback(ctx))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"kept"}, Note: budget.Note{Reason: "changed their mind"}})
		return err
	}))
	setClock(noon.Add(time.Minute))
	_, err = book.Sweep(ctx, pool, holds.SweepOptions{}) // announces holds that ended by time
	check(err)

	rows, err := pool.Query(ctx, `select hold, version, kind from outbox order by id`)
	check(err)
	var hold, kind string
	var version int
	_, err = pgx.ForEachRow(rows, []any{&hold, &version, &kind}, func() error {
		fmt.Println(hold, version, kind)
		return nil
	})
	check(err)
	// Output:
	// kept 1 placed
	// short 1 placed
	// kept 2 released
	// short 2 expired
}

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
	w.Report(report) // also if there is an error: some holds were swept
	return err
}

// Where River runs anyway, a periodic job sweeps: its leader enqueues one every so
// often, with any number of processes.
func ExampleBook_Sweep_river() {
	ctx := context.Background()
	pool, done := exampleOverdue(ctx)
	defer done()
	book := exampleBook(holds.Config{})

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
	pool, done := exampleOverdue(ctx)
	defer done()
	book := exampleBook(holds.Config{})

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
	pool, done := exampleOverdue(ctx)
	defer done()

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

// exampleOverdue is a database with a hold that is past its deadline.
func exampleOverdue(ctx context.Context) (pool *pgxpool.Pool, done func()) {
	noon := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(noon)
	book := exampleBook(holds.Config{})
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Place(ctx, tx, holds.Placement{ID: "short", TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		return err
	}))
	setClock(noon.Add(time.Minute))
	return pool, done
}

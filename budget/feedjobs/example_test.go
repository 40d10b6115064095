package feedjobs_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/budget/feedjobs"
)

// The consumer "bill" writes a line for each charge. Its job follows the feed, and looks for new entries ten times a second.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	_, err := pool.Exec(ctx, "create table lines (number bigint primary key, scope text not null, amount bigint not null)")
	check(err)
	ledger, err := budget.New(budget.Config{})
	check(err)

	billed := make(chan string)
	bill := feedjobs.Consumer{Name: "bill", FeedOptions: budget.FeedOptions{Poll: 100 * time.Millisecond},
		Do: func(ctx context.Context, tx pgx.Tx, entries []budget.FeedEntry) error {
			for _, e := range entries {
				if e.Kind != budget.EntryCharge {
					continue
				}
				if _, err := tx.Exec(ctx, "insert into lines values ($1, $2, $3)", e.Number, e.Scope, e.Amount); err != nil {
					return err
				}
				billed <- fmt.Sprint(e.Scope, " ", e.Amount)
			}
			return nil
		}}
	workers := river.NewWorkers()
	river.AddWorker(workers, feedjobs.NewWorker(pool, ledger, bill))
	queue, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}}, Workers: workers,
		PeriodicJobs: feedjobs.PeriodicJobs(time.Minute, bill),
	})
	check(err)
	check(queue.Start(ctx))
	defer queue.StopAndCancel(ctx)

	for _, scope := range []string{"org/acme", "org/umbrella"} {
		_, err = ledger.ChargeNow(ctx, pool, budget.Charge{Scope: scope, Amount: 600})
		check(err)
		fmt.Println(<-billed)
	}

	// Output:
	// org/acme 600
	// org/umbrella 600
}

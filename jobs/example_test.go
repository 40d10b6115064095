package jobs_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/jobs"
)

// ProcessAsset is a job of the examples.
type ProcessAsset struct {
	ID int `json:"id"`
}

func (ProcessAsset) Kind() string { return "process_asset" }

// A job is enqueued once for its key, by the transaction that makes it necessary,
// and a worker reads its tenant.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()

	worked := make(chan string)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[ProcessAsset]) error {
		worked <- fmt.Sprintf("asset %d of %s, for the key %s", job.Args.ID, jobs.Of(job.JobRow).Tenant, jobs.Of(job.JobRow).Key)
		return nil
	}))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}},
		Workers: workers,
		Plugins: []rivertype.Plugin{jobs.Plugin()},
	})
	if err != nil {
		panic(err)
	}
	enqueuer, err := jobs.New(client, jobs.Config{})
	if err != nil {
		panic(err)
	}
	if err := client.Start(ctx); err != nil {
		panic(err)
	}
	defer func() { _ = client.Stop(ctx) }()

	accept := func() error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// … your own writes …
			result, err := enqueuer.Enqueue(ctx, tx, ProcessAsset{ID: 42}, &jobs.Options{Key: "asset/42", Tenant: "acme"})
			if err == nil {
				fmt.Println("created:", result.Created)
			}
			return err
		})
	}
	for range 2 { // the second time because a client tried again
		if err := accept(); err != nil {
			panic(err)
		}
	}
	fmt.Println("worked:", <-worked)
	record, err := enqueuer.Find(ctx, pool, "", "asset/42")
	if err != nil {
		panic(err)
	}
	fmt.Println("remembered:", record.Kind)

	// Output:
	// created: true
	// created: false
	// worked: asset 42 of acme, for the key asset/42
	// remembered: process_asset
}

func ExampleEnqueuer_EnqueueMany() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, // insert-only: no workers here
	})
	if err != nil {
		panic(err)
	}
	enqueuer, err := jobs.New(client, jobs.Config{})
	if err != nil {
		panic(err)
	}

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		results, err := enqueuer.EnqueueMany(ctx, tx, []jobs.Item{
			{Args: ProcessAsset{ID: 1}, Options: &jobs.Options{Key: "asset/1"}},
			{Args: ProcessAsset{ID: 2}, Options: &jobs.Options{Key: "asset/2", InsertOpts: river.InsertOpts{Queue: "bulk"}}},
			{Args: ProcessAsset{ID: 1}, Options: &jobs.Options{Key: "asset/1"}},
			{Args: ProcessAsset{ID: 3}},
		})
		for i, result := range results {
			fmt.Println(i, "created:", result.Created, "same as the first:", result.JobID == results[0].JobID)
		}
		return err
	})
	if err != nil {
		panic(err)
	}

	// Output:
	// 0 created: true same as the first: true
	// 1 created: true same as the first: false
	// 2 created: false same as the first: true
	// 3 created: true same as the first: false
}

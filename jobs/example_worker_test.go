package jobs_test

import (
	"context"
	"fmt"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
)

// Transcribe is a job for River. Its estimated cost is held by Hold.
type Transcribe struct {
	Hold  jobs.HoldRef `json:"hold"`
	Words int64        `json:"words"`
}

func (Transcribe) Kind() string { return "transcribe" }

// HeldBy is for jobs.NewWorker.
func (t Transcribe) HeldBy() jobs.HoldRef { return t.Hold }

// The estimate is held and the job enqueued, or neither. The job's cost is captured together with its end, and the rest
// is free.
func ExampleNewWorker() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	workers := river.NewWorkers()
	riverClient, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
	})
	check(err)
	client, err := metered.New(pool, metered.Config{River: riverClient})
	check(err)
	river.AddWorker(workers, jobs.NewWorker(pool, client.Holds, func(_ context.Context, job *river.Job[Transcribe]) (jobs.JobCost, error) {
		return jobs.JobCost{
			Lines: []holds.Line{{Scope: "org/acme", Amount: job.Args.Words}},
			Over:  holds.OverAllowed, // the work is done, also if it cost more than the estimate
		}, nil
	}, jobs.WorkerOptions{}))
	finished, unsubscribe := riverClient.Subscribe(river.EventKindJobCompleted)
	defer unsubscribe()
	check(riverClient.Start(ctx))

	_, err = metered.Do(ctx, client, metered.Command{ID: "request-1", Tenant: "ann", Name: "transcribe", Input: "recording.wav"},
		func(ctx context.Context, tx *metered.Tx) (any, error) {
			id, err := tx.Place(ctx, holds.Placement{
				TTL:   10 * time.Minute, // for the wait in the queue
				Lines: []holds.Line{{Scope: "org/acme", Amount: 500, Limits: []budget.Limit{budget.PerWindow(1_000, time.Hour)}}},
			}, nil)
			if err != nil {
				return nil, err
			}
			_, err = tx.Enqueue(ctx, Transcribe{Hold: jobs.HoldRef{ID: id}, Words: 320}, nil)
			return nil, err
		})
	check(err)
	<-finished
	check(riverClient.Stop(ctx))

	usage, err := client.Budget.Usage(ctx, pool, budget.Query{Scope: "org/acme", Window: time.Hour})
	check(err)
	fmt.Println("charged", usage[0].Used, "held", usage[0].Held, "available", usage[0].Available(1_000))
	// Output:
	// charged 320 held 0 available 680
}

package jobs_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
)

// Prompt is a job that calls a model.
type Prompt struct {
	Text string `json:"text"`
}

func (Prompt) Kind() string { return "prompt" }

// gatedEnqueuer makes an Enqueuer whose jobs can wait for units.
func gatedEnqueuer(pool *pgxpool.Pool, workers *river.Workers, config jobs.Config) (*jobs.Enqueuer, *river.Client[pgx.Tx], *budget.Ledger) {
	riverConfig := &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}}
	if workers != nil {
		riverConfig.Workers, riverConfig.Queues = workers, map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}}
	}
	client, err := river.NewClient(riverpgxv5.New(pool), riverConfig)
	check(err)
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := holds.New(ledger, holds.Config{})
	check(err)
	config.Holds = book
	enqueuer, err := jobs.New(client, config)
	check(err)
	return enqueuer, client, ledger
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// At most two prompts of a tenant run at once, whatever its backlog is. Each job that ends starts the next of its tenant.
func ExampleEnqueuer_Run() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	workers := river.NewWorkers()
	worked := make(chan string, 10)
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[Prompt]) error {
		worked <- job.Args.Text
		return nil
	}))
	enqueuer, client, _ := gatedEnqueuer(pool, workers, jobs.Config{})

	parked := 0
	for i := range 5 {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			result, err := enqueuer.Enqueue(ctx, tx, Prompt{Text: fmt.Sprint("prompt ", i)}, &jobs.Options{
				Tenant: "acme",
				Hold: &jobs.Units{
					Lines:   []holds.Line{{Scope: "running/acme", Amount: 1, Limits: []budget.Limit{budget.Lifetime(2)}}},
					Charges: []budget.Charge{{Scope: "prompts/acme", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1_000, time.Hour)}}},
				},
			})
			if result.Parked {
				parked++
			}
			return err
		}))
	}
	fmt.Println("parked:", parked)

	check(client.Start(ctx))
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- enqueuer.Run(running, pool, func(err error) { fmt.Println(err) }) }()
	for range 5 {
		<-worked
	}
	fmt.Println("all are worked")
	stop()
	<-ended
	check(client.Stop(ctx))

	// Output:
	// parked: 3
	// all are worked
}

// Each tenant always gets two jobs at once, and beside them what a pool of three has free.
func ExampleEnqueuer_EnqueueMany_minimum() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	enqueuer, _, _ := gatedEnqueuer(pool, nil, jobs.Config{})

	slot := func(scope string, most int64) *jobs.Units {
		return &jobs.Units{Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(most)}}}}
	}
	for _, tenant := range []string{"acme", "brisk"} {
		var items []jobs.Item
		for i := range 10 {
			items = append(items, jobs.Item{Args: Prompt{Text: fmt.Sprint("prompt ", i)}, Options: &jobs.Options{
				Tenant: tenant, Hold: slot("own/"+tenant, 2), Burst: slot("pool", 3),
			}})
		}
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			results, err := enqueuer.EnqueueMany(ctx, tx, items)
			started := 0
			for _, r := range results {
				if !r.Parked {
					started++
				}
			}
			fmt.Println(tenant, "starts", started)
			return err
		}))
	}

	// Output:
	// acme starts 5
	// brisk starts 2
}

// A batch waits for a budget of tokens per minute, which requests share. The plan is raised, and jobs start with that.
func ExampleEnqueuer_ReleaseIn() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	perHour := int64(1_000) // of the customer's plan, in your own table
	limits := func(context.Context, pgx.Tx, string) ([]budget.Limit, error) {
		return []budget.Limit{budget.PerWindow(perHour, time.Hour)}, nil
	}
	enqueuer, _, ledger := gatedEnqueuer(pool, nil, jobs.Config{Limits: limits})

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		now, err := limits(ctx, tx, "tokens/acme")
		if err != nil {
			return err
		}
		// A request spends of the same budget.
		if _, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "tokens/acme", Amount: 300, Limits: now}); err != nil {
			return err
		}
		var items []jobs.Item
		for i := range 3 {
			items = append(items, jobs.Item{Args: Prompt{Text: fmt.Sprint("page ", i)}, Options: &jobs.Options{
				Key: fmt.Sprint("page/", i), MaxWait: 24 * time.Hour, MaxParked: 10_000,
				Hold: &jobs.Units{Lines: []holds.Line{{Scope: "tokens/acme", Amount: 400, Limits: now}}}, // an estimate
			}})
		}
		results, err := enqueuer.EnqueueMany(ctx, tx, items)
		for i, r := range results {
			fmt.Println("page", i, "parked:", r.Parked)
		}
		return err
	}))

	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		perHour = 1_200
		started, err := enqueuer.ReleaseIn(ctx, tx, "tokens/acme")
		for _, r := range started {
			fmt.Println("started:", string(r.Job.EncodedArgs), "with a hold:", jobs.Of(r.Job).Hold != "")
		}
		return err
	}))

	// Output:
	// page 0 parked: false
	// page 1 parked: true
	// page 2 parked: true
	// started: {"text": "page 1"} with a hold: true
}

// One job at a time for a key. Jobs that wait are listed, explained, moved and cancelled.
func ExampleEnqueuer_Parked() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	enqueuer, client, _ := gatedEnqueuer(pool, nil, jobs.Config{})
	one := &jobs.Options{Hold: &jobs.Units{Lines: []holds.Line{{Scope: "import/shop-7", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}}
	var all [4]jobs.Result
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		for i := range all {
			if all[i], err = enqueuer.Enqueue(ctx, tx, Prompt{Text: fmt.Sprint("import ", i)}, one); err != nil {
				return err
			}
		}
		return nil
	}))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := enqueuer.CancelParked(ctx, tx, all[1].JobID); err != nil {
			return err
		}
		_, err := enqueuer.Reprioritize(ctx, tx, all[2].JobID, 4)
		return err
	}))

	line, err := enqueuer.Parked(ctx, pool, "import/shop-7", 0, 100)
	check(err)
	for _, p := range line {
		fmt.Println("waits:", string(p.Args))
	}
	why, err := enqueuer.Explain(ctx, pool, all[2].JobID)
	check(err)
	fmt.Println("position", why.Position, "of", why.Waiting)

	_, err = client.JobCancel(ctx, all[0].JobID)
	check(err)
	report, err := enqueuer.Release(ctx, pool) // as Run does by itself
	check(err)
	fmt.Println("ended", report.Ended, "released", report.Released)

	// Output:
	// waits: {"text": "import 3"}
	// waits: {"text": "import 2"}
	// position 2 of 2
	// ended 1 released 1
}

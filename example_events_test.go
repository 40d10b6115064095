package metered_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
)

// Best effort: another process hears of payments of 1,000 and more once they have committed.
func ExampleClient_Listen() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{Notify: metered.Notify{ChargesFrom: 1_000}})
	check(err)
	pay := func(id string, amount int64) {
		_, err := metered.Do[any](ctx, client, metered.Command{ID: id, Charges: []budget.Charge{{
			Scope: "wallet/ann", Amount: amount, Limits: []budget.Limit{budget.PerWindow(5_000, time.Hour)},
		}}}, nil)
		fmt.Println(id, err == nil)
	}
	enough := errors.New("enough")
	err = client.Listen(ctx, pool, holds.ListenOptions{}, func(_ context.Context, n metered.Notice) error {
		if n.Missed { // first of all: read what is there (Ledger.Entries), then follow
			pay("small", 10)
			pay("refused", 9_000)
			pay("large", 2_000)
			return nil
		}
		fmt.Println("heard:", n.ID, n.Charges[0].Scope, n.Charges[0].Amount)
		return enough
	})
	fmt.Println(err)
	// Output:
	// small true
	// refused false
	// large true
	// heard: large wallet/ann 2000
	// enough
}

// Released is a hold's release, for a worker.
type Released struct {
	Hold, Holder, Reason string
}

// Kind is River's name for it.
func (Released) Kind() string { return "released" }

// Exactly once: the transition enqueues a job in its own transaction. The job is there if and
// only if the transition is, and its key keeps it one.
func ExampleClient_exactlyOnce() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	worked := make(chan string)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[Released]) error {
		worked <- fmt.Sprintf("%s of %s is free: %s", job.Args.Hold, job.Args.Holder, job.Args.Reason)
		return nil
	}))
	queue, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Workers: workers, Queues: map[string]river.QueueConfig{"default": {MaxWorkers: 1}},
	})
	check(err)
	enqueuer, err := jobs.New(queue, jobs.Config{})
	check(err)
	tell := func(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
		if t.Kind != holds.EventReleased {
			return nil
		}
		_, err := enqueuer.Enqueue(ctx, tx, Released{t.Hold.ID, t.Hold.Holder, t.Note.Reason},
			&jobs.Options{Key: fmt.Sprintf("hold/%s/%d", t.Hold.ID, t.Hold.Version)})
		return err
	}
	client, err := metered.New(pool, metered.Config{River: queue, Holds: holds.Config{Subscribers: []holds.Subscriber{tell}}})
	check(err)
	check(queue.Start(ctx))
	defer func() { check(queue.Stop(ctx)) }()

	_, err = metered.Do(ctx, client, metered.Command{ID: "hold", Input: "22B"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		return tx.Place(ctx, holds.Request{ID: "seat 22B", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{{Scope: "seat/22B", Amount: 1}}}, nil)
	})
	check(err)
	for range 2 { // and once more, as after a lost answer
		_, err = metered.Do(ctx, client, metered.Command{ID: "release", Input: "22B"}, func(_ context.Context, tx *metered.Tx) (any, error) {
			return nil, tx.Release(holds.Release{IDs: []string{"seat 22B"}, Note: budget.Note{Reason: "changed their mind"}})
		})
		check(err)
	}
	fmt.Println(<-worked)
	// Output: seat 22B of ann is free: changed their mind
}

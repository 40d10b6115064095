package holds_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// A fitting room is held for ten minutes, and a job of your queue ends each hold when its time is over. A client can
// ask for more time, up to a bound: the first job then leaves the hold alone, and the job of the new deadline ends it.
// Where the queue is River, jobs.NewCleanupWorker does that.
func ExampleBook_Expire() {
	ctx := context.Background()
	noon := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(noon)
	defer done()
	book := exampleBook(holds.Config{MaxTTL: 10 * time.Minute, MaxLifetime: 25 * time.Minute})
	var queue []holds.Expire // stands for your jobs, each of which runs at its Deadline
	scheduled := func(h holds.Hold) {
		queue = append(queue, holds.Expire{ID: h.ID, Deadline: h.Deadline, Note: budget.Note{Actor: "job:end-hold"}})
	}
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		h, err := book.Place(ctx, tx, holds.Placement{ID: "room-3", Holder: "ann", TTL: 10 * time.Minute,
			Lines: []holds.Line{{Scope: "room/3", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}})
		scheduled(h)
		return err
	}))

	for range 2 {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			longer, err := book.Extend(ctx, tx, holds.Extend{IDs: []string{"room-3"}, Holder: "ann", By: 10 * time.Minute})
			if err == nil {
				fmt.Println("extended until", longer[0].Deadline.Format("15:04"))
				scheduled(longer[0])
			}
			return err
		})
		if errors.Is(err, holds.ErrCeiling) {
			fmt.Println(err)
			continue
		}
		check(err)
	}
	for _, job := range queue {
		setClock(job.Deadline)
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			h, ended, err := book.Expire(ctx, tx, job)
			fmt.Printf("%s job: it ended the hold: %v, which is %s\n", job.Deadline.Format("15:04"), ended, h.State)
			return err
		}))
	}
	// Output:
	// extended until 12:20
	// holds: the extension leads past the hold's ceiling: "room-3" has 5m0s left
	// 12:10 job: it ended the hold: false, which is held
	// 12:20 job: it ended the hold: true, which is expired
}

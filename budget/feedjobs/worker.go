package feedjobs

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
)

// Consumer is a consumer of the feed.
type Consumer struct {
	// Name is what ConsumeFeed calls the consumer.
	Name string

	// FeedOptions are those of RunFeed. With Poll the job goes on for ever, and looks again after
	// that time. Without it, the job ends where nothing is new.
	budget.FeedOptions

	// Do is called by RunFeed with each page of entries, in the transaction that consumes them.
	Do func(ctx context.Context, tx pgx.Tx, entries []budget.FeedEntry) error
}

// Args are the args of a job.
type Args struct {
	// Consumer is the consumer's name.
	Consumer string `json:"consumer"`
}

// Kind is the job's kind in River, "metered_feed".
func (Args) Kind() string { return "metered_feed" }

// PeriodicJobs are a job for each consumer, by default each minute, and when River starts. A job that
// fails is not tried again: the next one goes on.
func PeriodicJobs(every time.Duration, consumers ...Consumer) []*river.PeriodicJob {
	var all []*river.PeriodicJob
	for _, c := range consumers {
		all = append(all, river.NewPeriodicJob(river.PeriodicInterval(cmp.Or(every, time.Minute)),
			func() (river.JobArgs, *river.InsertOpts) { return Args{c.Name}, &river.InsertOpts{MaxAttempts: 1} },
			&river.PeriodicJobOpts{RunOnStart: true}))
	}
	return all
}

// NewWorker returns the worker of Args. A job of a consumer that another job runs ends at once. The
// job has no timeout. Its output is the budget.FeedConsumer, which says how far the consumer is. An
// error of Do, or a *budget.FeedGapError, is the job's. A job needs two connections of pool.
func NewWorker(pool *pgxpool.Pool, ledger *budget.Ledger, consumers ...Consumer) river.Worker[Args] {
	return &worker{pool: pool, ledger: ledger, consumers: consumers, turn: time.Minute}
}

type worker struct {
	river.WorkerDefaults[Args]
	pool      *pgxpool.Pool
	ledger    *budget.Ledger
	consumers []Consumer

	// turn is how long a job follows the feed before other jobs of its queue have their turn.
	// River takes one that works for an hour for lost.
	turn time.Duration
}

// Timeout is none: a consumer that is far behind has much to do.
func (*worker) Timeout(*river.Job[Args]) time.Duration { return -1 }

// Two numbers lock apart from those of scopes, which are one.
const tryLockSQL = `
select pg_catalog.pg_try_advisory_xact_lock((key >> 32)::int, (key << 32 >> 32)::int)
from pg_catalog.hashtextextended('metered feedjobs ' || $1, 0) key`

// Work runs a job. Its lock ends with the process, where a unique job of River's would keep others
// out until River takes it for lost. The transaction keeps no snapshot.
func (w *worker) Work(ctx context.Context, job *river.Job[Args]) error {
	at := slices.IndexFunc(w.consumers, func(c Consumer) bool { return c.Name == job.Args.Consumer })
	if at < 0 {
		return fmt.Errorf("feedjobs: no consumer %q", job.Args.Consumer)
	}
	return pgx.BeginTxFunc(ctx, w.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		var free bool
		err := answer.QueryRow(ctx, tx, tryLockSQL, job.Args.Consumer).Scan(&free)
		if err != nil || !free {
			return err
		}
		return w.follow(ctx, w.consumers[at])
	})
}

// follow consumes what is new, and with Poll goes on for a turn.
func (w *worker) follow(ctx context.Context, c Consumer) error {
	ends, poll := time.Now().Add(w.turn), c.Poll
	c.Poll = 0
	for {
		err := w.ledger.RunFeed(ctx, w.pool, c.Name, c.FeedOptions, c.Do)
		switch {
		case ctx.Err() != nil:
			return river.JobSnooze(time.Second) // River stops: no attempt is lost
		case err != nil:
			return err
		case poll == 0 || time.Now().After(ends):
			if err := w.report(ctx, c.Name); err != nil || poll == 0 {
				return err
			}
			return river.JobSnooze(0) // and goes on at once
		}
		select {
		case <-ctx.Done():
		case <-time.After(poll):
		}
	}
}

// report makes the consumer's state the job's output.
func (w *worker) report(ctx context.Context, name string) error {
	all, err := w.ledger.FeedConsumers(ctx, w.pool)
	for _, c := range all {
		if c.Name == name {
			return river.RecordOutput(ctx, c)
		}
	}
	return err
}

package carvejobs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

type jobArgs = river.JobArgs

// creditArgs are the args of the job at home that gives a child its units.
type creditArgs struct {
	Link
	Amount int64       `json:"amount"`
	EndsAt time.Time   `json:"ends_at"`
	Note   budget.Note `json:"note,omitzero"`
}

func (creditArgs) Kind() string { return "metered_carve_credit" }

// endArgs are the args of the job away that closes a child: at its end, or when its held units may
// have come free.
type endArgs struct{ Link }

func (endArgs) Kind() string { return "metered_carve_end" }

// spentArgs are the args of the job away that carries the number of units spent by a child to home.
type spentArgs struct {
	Link
	Used int64 `json:"used"`
}

func (spentArgs) Kind() string { return "metered_carve_spent" }

// AddWorkers registers the workers. Each cluster needs a River client that works them, in a process
// that reaches both clusters.
func (c *Clusters) AddWorkers(workers *river.Workers) {
	river.AddWorker(workers, &worker[creditArgs]{clusters: c, step: c.credit})
	river.AddWorker(workers, &worker[endArgs]{clusters: c, step: c.endDue})
	river.AddWorker(workers, &worker[spentArgs]{clusters: c, step: c.settle})
}

type worker[T jobArgs] struct {
	river.WorkerDefaults[T]
	clusters *Clusters
	step     func(ctx context.Context, args T, note budget.Note) error
}

// Work does a step. It retries a step that can succeed later, however long the other cluster is
// away. A job that can never succeed fails, so that somebody sees it.
func (w *worker[T]) Work(ctx context.Context, job *river.Job[T]) error {
	c := w.clusters
	if err := c.made(); err != nil {
		return err
	}
	err := w.step(ctx, job.Args, budget.Note{Actor: "job:" + job.Kind,
		Correlation: fmt.Sprintf("job %d", job.ID)})
	if err == nil || hopeless(err) {
		return err
	}
	stopped := errors.Is(ctx.Err(), context.Canceled) // by River
	if c.cfg.OnError != nil && !stopped && !errors.Is(err, errHeld) {
		c.cfg.OnError(err)
	}
	return river.JobSnooze(c.cfg.RetryAfter)
}

func hopeless(err error) bool {
	for _, never := range []error{budget.ErrArgument, leases.ErrUnknownChild, budget.ErrConflict} {
		if errors.Is(err, never) {
			return true
		}
	}
	return false
}

// credit gives a child its units, and sees to its end.
func (c *Clusters) credit(ctx context.Context, args creditArgs, _ budget.Note) error {
	_, away, err := c.find(args.Link)
	if err != nil {
		return err
	}
	_, err = do(ctx, away, creditStep, args.Child, args,
		func(ctx context.Context, tx *metered.Tx) (leases.Lease, error) {
			l, err := away.carver.Receive(ctx, tx,
				leases.Lease{Child: args.Child, Granted: args.Amount, EndsAt: args.EndsAt}, args.Note)
			switch {
			case errors.Is(err, leases.ErrChildUsed): // it is somebody else's: nothing was given, and home has all of it back
				return c.report(ctx, tx, args.Link, leases.Lease{}, nil)
			case err != nil:
				return l, err
			case !l.SettledAt.IsZero(): // it came too late
				return c.report(ctx, tx, args.Link, l, nil)
			}
			return l, c.enqueue(ctx, tx, endArgs{args.Link}, l.EndsAt)
		})
	return err
}

// endDue ends a child whose time is over.
func (c *Clusters) endDue(ctx context.Context, args endArgs, note budget.Note) error {
	l, err := c.End(ctx, args.Link, note)
	if err == nil && l.SettledAt.IsZero() {
		err = errHeld
	}
	return err
}

// settle settles a child at home, and notes on the child's cluster that this is done.
func (c *Clusters) settle(ctx context.Context, args spentArgs, note budget.Note) error {
	home, away, err := c.find(args.Link)
	if err != nil {
		return err
	}
	_, err = do(ctx, home, settleStep, args.Child, args,
		func(ctx context.Context, tx *metered.Tx) (leases.Lease, error) {
			return home.carver.SettleAway(ctx, tx, args.Child, args.Used, note)
		})
	if err != nil {
		return err
	}
	err = away.client.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		_, err := away.carver.SettleAway(ctx, tx, args.Child, args.Used, note)
		return err
	})
	if errors.Is(err, leases.ErrUnknownChild) { // the scope was another's, or the row is purged
		return nil
	}
	return err
}

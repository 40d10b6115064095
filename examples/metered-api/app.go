package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/jobs"
)

// tasksSQL is the application's own table.
const tasksSQL = `
create table if not exists tasks (
    account text,
    id      text,       -- of its hold, too
    number  bigint not null,
    factors bigint[],   -- by the worker
    primary key (account, id)
)`

// If a worker dies, River has its jobs tried again after rescueAfter and half a minute at most, or when it has chosen another
// leader. They are held for longer than that.
const (
	queueTime   = 10 * time.Minute // a job may wait for so long
	workTime    = time.Second      // and be worked for so long
	retryAfter  = time.Second
	rescueAfter = 3 * time.Second
	margin      = 2 * time.Minute
	maxAttempts = 3
)

// app factors numbers for accounts that pay by the work.
type app struct {
	pool    *pgxpool.Pool
	river   *river.Client[pgx.Tx]
	metered *metered.Client
	limits  []budget.Limit // of each account
}

func newApp(pool *pgxpool.Pool, limits []budget.Limit) (*app, error) {
	a := &app{pool: pool, limits: limits}
	workers := river.NewWorkers()
	var err error
	a.river, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:               map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
		Workers:              workers,
		JobTimeout:           workTime,
		RescueStuckJobsAfter: rescueAfter,
		FetchPollInterval:    100 * time.Millisecond,
		Logger:               slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return nil, err
	}
	a.metered, err = metered.New(pool, metered.Config{River: a.river})
	if err != nil {
		return nil, err
	}
	river.AddWorker(workers, jobs.NewWorker(a.pool, a.metered.Holds, a.work, jobs.WorkerOptions{
		Timeout: workTime, RetryAfter: retryAfter, Margin: margin,
	}))
	return a, nil
}

// task is a job. Its estimated cost is held by Hold.
type task struct {
	Hold   jobs.HoldRef `json:"hold"`
	Number int64        `json:"number"`
}

// Kind is the job's kind.
func (task) Kind() string { return "factorize" }

// HeldBy is for jobs.NewWorker.
func (t task) HeldBy() jobs.HoldRef { return t.Hold }

func scopeOf(account string) string { return budget.ScopeKey("work", account, "") }

// submitted is the answer to a request.
type submitted struct {
	ID    string `json:"id"`
	Units int64  `json:"units_held"`
}

// submit holds the largest cost of the work and enqueues it, or does neither, in the command of its request.
func (a *app) submit(ctx context.Context, tx *metered.Tx, account string, number int64) (submitted, error) {
	estimate := units(atMost(number))
	id, err := tx.Place(ctx, holds.Placement{
		Tenant: account, TTL: queueTime,
		Lines: []holds.Line{{Scope: scopeOf(account), Amount: estimate, Limits: a.limits}},
	}, nil)
	if err != nil {
		return submitted{}, err
	}
	if _, err := tx.Exec(ctx, `insert into tasks (account, id, number) values ($1, $2, $3)`, account, id, number); err != nil {
		return submitted{}, err
	}
	_, err = tx.Enqueue(ctx, task{jobs.HoldRef{Tenant: account, ID: id}, number},
		&jobs.Options{Tenant: account, InsertOpts: river.InsertOpts{MaxAttempts: maxAttempts}})
	return submitted{id, estimate}, err
}

// work does a job, and returns its cost. The capture, Write's rows and the end of the job commit together. A failed
// job is tried again, and its last failure releases the hold.
func (a *app) work(ctx context.Context, job *river.Job[task]) (jobs.JobCost, error) {
	hold := job.Args.Hold
	factors, divisions, err := factorize(ctx, job.Args.Number)
	if err != nil {
		return jobs.JobCost{}, err
	}
	return jobs.JobCost{
		Lines: []holds.Line{{Scope: scopeOf(hold.Tenant), Amount: units(divisions)}},
		Write: func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `update tasks set factors = $3 where account = $1 and id = $2`, hold.Tenant, hold.ID, factors)
			return err
		},
	}, nil
}

// status is how a task stands.
type status struct {
	ID      string  `json:"id"`
	Number  int64   `json:"number"`
	State   string  `json:"state"` // waiting, done, failed
	Factors []int64 `json:"factors,omitempty"`
	Held    int64   `json:"units_held"`
	Charged int64   `json:"units_charged"`
}

var errNoTask = &httpmetered.Problem{Status: http.StatusNotFound, Detail: "no such task"}

// status reads the hold first: once that is captured, the factors are there.
func (a *app) status(ctx context.Context, account, id string) (status, error) {
	h, err := a.metered.Holds.Get(ctx, a.pool, account, id, "")
	if errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired) {
		return status{}, errNoTask
	} else if err != nil {
		return status{}, err
	}
	s := status{ID: id, Held: h.Lines[0].Open, Charged: h.Lines[0].Captured}
	var factors []int64
	err = a.pool.QueryRow(ctx, `select number, factors from tasks where account = $1 and id = $2`, account, id).Scan(&s.Number, &factors)
	if err != nil {
		return status{}, fmt.Errorf("the task of hold %q: %w", id, err)
	}
	switch h.State {
	case holds.Held:
		s.State = "waiting"
	case holds.Captured:
		s.State, s.Factors = "done", factors
	default: // given back: the last attempt failed, or nobody worked it in time
		s.State = "failed"
	}
	return s, nil
}

// sweep records expired holds. Their units are free without it.
func (a *app) sweep(ctx context.Context) error {
	_, err := a.metered.Holds.Sweep(ctx, a.pool, holds.SweepOptions{})
	return err
}

// factorize finds the prime factors of n, from 2 up, by trying. It counts its divisions. ctx may end it before.
func factorize(ctx context.Context, n int64) (factors []int64, divisions int64, err error) {
	for d := int64(2); d <= n/d; divisions++ {
		if divisions%(1<<20) == 0 && ctx.Err() != nil {
			return nil, divisions, context.Cause(ctx)
		}
		switch {
		case n%d == 0:
			factors = append(factors, d)
			n /= d
		case d == 2:
			d = 3
		default:
			d += 2
		}
	}
	return append(factors, n), divisions, nil
}

// atMost bounds the divisions of factorize: it tries 2 and the odd numbers to the root, and each divisor again.
func atMost(n int64) int64 { return int64(math.Sqrt(float64(n)))/2 + 64 }

// units are the cost of divisions: 1 for each 1000 begun.
func units(divisions int64) int64 { return max(1, (divisions+999)/1000) }

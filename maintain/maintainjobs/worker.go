package maintainjobs

import (
	"cmp"
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/maintain"
)

// Args are the args of a job: sweeps or purges.
type Args struct {
	// Purge runs the purges. Without it the job runs the sweeps.
	Purge bool `json:"purge"`
}

// Kind is the job's kind in River, "metered_maintain".
func (Args) Kind() string { return "metered_maintain" }

// PeriodicJobs are the sweeps, by default each minute, and the purges, by default each 24 hours,
// and both when River starts. A negative time leaves them out. A sweep that fails is not tried
// again, and a purge is tried three times.
func PeriodicJobs(sweep, purge time.Duration) []*river.PeriodicJob {
	var all []*river.PeriodicJob
	add := func(every time.Duration, args Args, attempts int) {
		if every > 0 {
			all = append(all, river.NewPeriodicJob(river.PeriodicInterval(every),
				func() (river.JobArgs, *river.InsertOpts) {
					return args,
						&river.InsertOpts{MaxAttempts: attempts}
				},
				&river.PeriodicJobOpts{RunOnStart: true}))
		}
	}
	add(cmp.Or(sweep, time.Minute), Args{}, 1)
	add(cmp.Or(purge, 24*time.Hour), Args{Purge: true}, 3)
	return all
}

// NewWorker returns the worker of Args. The job has no timeout. Its output is the maintain.Report,
// from which a job that was stopped or failed goes on.
func NewWorker(pool *pgxpool.Pool, parts maintain.Parts, policy maintain.Policy) river.Worker[Args] {
	return &worker{pool: pool, parts: parts, policy: policy}
}

type worker struct {
	river.WorkerDefaults[Args]
	pool   *pgxpool.Pool
	parts  maintain.Parts
	policy maintain.Policy
}

// Timeout is none: the purge of a large ledger takes its time.
func (*worker) Timeout(*river.Job[Args]) time.Duration { return -1 }

// Work runs a job.
func (w *worker) Work(ctx context.Context, job *river.Job[Args]) error {
	policy := w.policy
	var earlier maintain.Report // of this job's earlier attempt
	if output := job.Output(); output != nil && json.Unmarshal(output, &earlier) == nil {
		policy.After = earlier.After
	}
	if job.Args.Purge {
		if policy.NoPurges {
			return nil
		}
		policy.NoSweeps = true
	} else {
		if policy.NoSweeps {
			return nil
		}
		policy.NoPurges = true
	}
	report, err := maintain.Run(ctx, w.pool, w.parts, policy)
	if recorded := river.RecordOutput(ctx, report); recorded != nil && err == nil {
		return recorded
	}
	if ctx.Err() != nil {
		return river.JobSnooze(time.Second) // River stops: no attempt is lost
	}
	return err
}

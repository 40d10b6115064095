package jobs

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
)

func init() { lend.Lend("jobs", internals{}) }

// internals are lent to metered.
type internals struct{}

// Enqueue is Enqueuer.Enqueue in a command. A new job with Options.Hold is left to the call, for
// the command's end, and its result has its id alone. A nil call: all is done.
func (internals) Enqueue(ctx context.Context, e *Enqueuer, tx pgx.Tx, args river.JobArgs,
	opts *Options) (Result, *ledger.Call[Result], error) {
	if opts == nil || opts.Hold == nil {
		r, err := e.Enqueue(ctx, tx, args, opts)
		return r, nil, err
	}
	if err := cmp.Or(e.made(), notNil("tx", tx)); err != nil {
		return Result{}, nil, err
	}
	p, err := e.prepare("", args, opts)
	if err != nil {
		return Result{}, nil, err
	}
	p.late = &late{}
	results, err := e.enqueueAll(ctx, tx, []*prepared{p})
	if err != nil || !p.late.new {
		return first(results), nil, err
	}
	j := p.late.job
	call := &ledger.Call[Result]{
		SQL: e.gate.parkSQL, Locks: p.locks(), Kind: "park",
		Args: func(s ledger.Sending) []any { return e.parkArgs([]gatedJob{j}, p.parking, s) },
		Scan: func(row pgx.Row) (Result, error) {
			var answer parkAnswer
			r := Result{JobID: j.ID, Created: true}
			if err := row.Scan(answer.dest()...); err != nil {
				return r, e.parkFailed(p.parking, err)
			}
			err := answer.into(p, j, &r)
			if r.Parked {
				e.count(ctx, "parked", 1, true)
			}
			return r, err
		},
	}
	return results[0], call, nil
}

// Rest gives holds of jobs back that wait for their next attempt, as Run does.
func (internals) Rest(ctx context.Context, e *Enqueuer, tx pgx.Tx, tenant string, ids []string) error {
	_, err := e.endIn(ctx, tx, tenant, true, ids)
	return err
}

func first(results []Result) Result {
	if len(results) == 0 {
		return Result{}
	}
	return results[0]
}

// late is a job that is left to the end of its command.
type late struct {
	new bool
	job gatedJob
}

package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
)

var inBudget = budget.Internals(lend.Key{})

// ReleaseReport counts jobs and lines: the jobs that wait for one scope.
type ReleaseReport struct {
	Ended    int64 `json:"ended"`    // holds of jobs that had ended, or that Options.GiveBack gives back
	Released int64 `json:"released"` // jobs that River has now
	Dropped  int64 `json:"dropped"`  // jobs, after Options.MaxWait
	Busy     int64 `json:"busy"`     // lines whose scopes stayed locked
	Troubled int64 `json:"troubled"` // lines whose look failed: see Parked.Trouble
}

const (
	releaseBatch = 64 // jobs in a transaction
	dropBatch    = 200
)

const (
	// A job that was tried before has its row in River.
	releaseSQL = startsSQL + `
	select pg_catalog.row_number() over () as nth, r.*, r.status = 'released' and not r.job operator(pg_catalog.?) 'again' as starts
	from metered.release_jobs($2::text[], $3::text::jsonb, $4::int, $5::int, $6::interval, $7::metered.origin, $8::text) r` + insertedSQL + `, woken as (
	update river_job j set state = 'available', scheduled_at = least(j.scheduled_at, pg_catalog.now()), priority = (
		select (a.job operator(pg_catalog.->>) 'priority')::smallint from asked a where a.job operator(pg_catalog.->>) 'job_id' = j.id::text)
	where j.id = any (array(select (a.job operator(pg_catalog.->>) 'job_id')::bigint from asked a where a.status = 'released' and a.job operator(pg_catalog.?) 'again'))
		and j.state operator(pg_catalog.=) 'pending' and j.metadata operator(pg_catalog.->>) 'metered:hold' = (
			select a.job operator(pg_catalog.->) 'metadata' operator(pg_catalog.->>) 'metered:hold' from asked a
			where a.job operator(pg_catalog.->>) 'job_id' = j.id::text)
	returning j.id, j.created_at, j.scheduled_at, j.attempt, j.max_attempts, j.attempted_at, j.attempted_by, j.errors, j.metadata
)
select a.status, a.job, a.scope, coalesce(m.created_at, w.created_at), coalesce(m.scheduled_at, w.scheduled_at),
	case when w.id is not null then pg_catalog.jsonb_build_object('attempt', w.attempt, 'max_attempts', w.max_attempts,
		'attempted_at', w.attempted_at, 'attempted_by', w.attempted_by, 'errors', w.errors, 'metadata', w.metadata) end
from asked a left join made m on a.starts and m.id = (a.job operator(pg_catalog.->>) 'job_id')::bigint
	left join woken w on w.id::text = a.job operator(pg_catalog.->>) 'job_id', (select count(*) from said) s
order by a.nth`

	judgedSQL = `select metered.judged_scopes($1::text[], $2::int, $3::int)`
	nextSQL   = `select metered.next_release()`

	// dropped: River has it no longer as it was parked, since it was cancelled or tried by hand there.
	dropSQL = `
with gone as materialized (
	select d as job from metered.drop_parked($1::int) d
), ended as (
	update river_job j set state = 'discarded', finalized_at = pg_catalog.now()
	where j.id = any (array(select (g.job operator(pg_catalog.->>) 'job_id')::bigint from gone g where g.job operator(pg_catalog.->>) 'not_before' is not null))
		and j.state operator(pg_catalog.=) 'pending' and j.metadata operator(pg_catalog.->>) 'metered:hold' = (
			select g.job operator(pg_catalog.->>) 'hold' from gone g where g.job operator(pg_catalog.->>) 'job_id' = j.id::text)
	returning j.id
)
select g.job, g.job operator(pg_catalog.->>) 'not_before' is null or e.id is not null
from gone g left join ended e on e.id::text = g.job operator(pg_catalog.->>) 'job_id'`
)

// Release does the work of Run once, in its own transactions. Many may run at once.
func (e *Enqueuer) Release(ctx context.Context, pool *pgxpool.Pool) (report ReleaseReport, err error) {
	if err := e.gated("pool", pool); err != nil {
		return report, err
	}
	if report.Ended, err = e.endHolds(ctx, pool); err == nil {
		err = e.takeStrayed(ctx, pool)
	}
	if err != nil {
		return report, err
	}
	for more := true; more; {
		var busy []string
		if more, busy, err = e.releaseDue(ctx, pool, &report); err != nil {
			return report, err
		}
		if more {
			continue
		}
		for _, scope := range busy {
			if err := e.releaseBusy(ctx, pool, scope, &report); err != nil {
				return report, err
			}
		}
	}
	return report, nil
}

// ReleaseIn releases up to 64 parked jobs that wait for up to 64 scopes and fit by now, in the transaction that raises their limit or frees
// units. It locks the scopes until tx ends, so it comes last.
func (e *Enqueuer) ReleaseIn(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Result, error) {
	if err := e.gated("tx", tx); err != nil {
		return nil, err
	}
	if len(scopes) < 1 || len(scopes) > 64 {
		return nil, invalid("scopes", "%d of them: want 1 to 64", len(scopes))
	}
	b, err := e.releaseIn(ctx, tx, scopes)
	e.count(ctx, "released", int64(len(b.results)), true)
	return b.results, err
}

// gated refuses an Enqueuer without a Book, and an argument that is nil.
func (e *Enqueuer) gated(field string, arg any) error {
	if err := e.made(); err != nil {
		return err
	}
	if e.gate.book == nil {
		return invalid("Config.Holds", "is nil: this Enqueuer parks no jobs")
	}
	return notNil(field, arg)
}

// batch is what one transaction released.
type batch struct {
	results  []Result
	more     bool
	busy     []string
	troubled int64
}

// releaseIn releases jobs of these scopes, whose locks it waits for, or of all lines that are due, for nil.
func (e *Enqueuer) releaseIn(ctx context.Context, tx pgx.Tx, scopes []string) (b batch, err error) {
	wait := int32(e.wait / time.Millisecond)
	given, err := e.limitsNow(ctx, tx, scopes, wait)
	if err != nil {
		return b, err
	}
	probe, err := inBudget.Charges(inHolds.Ledger(e.gate.book), budget.Charge{Scope: "x", Amount: 1})
	if err != nil {
		return b, err
	}
	rows, err := tx.Query(ctx, e.gate.releaseSQL, e.gate.riverSchema, scopes, given, wait, releaseBatch, probe.Tolerance,
		ledger.Sending{}.Origin(`{"actor": "system"}`), inHolds.Channel(e.gate.book))
	if err != nil {
		return b, fault.Failed("jobs", "release", err)
	}
	var status string
	var job []byte
	var scope pgtype.Text
	var createdAt, scheduledAt *time.Time
	var tried []byte
	var strayed []ofJob
	_, err = pgx.ForEachRow(rows, []any{&status, &job, &scope, &createdAt, &scheduledAt, &tried}, func() error {
		switch status {
		case "more":
			b.more = true
		case "busy":
			b.busy = append(b.busy, scope.String)
		case "trouble":
			b.troubled++
		default:
			var j releasedJob
			if err := json.Unmarshal(job, &j); err != nil {
				return err
			}
			if createdAt == nil {
				strayed = append(strayed, ofJob{tenant: readMetadata(j.Metadata).Tenant, id: readMetadata(j.Metadata).Hold})
				return nil
			}
			row := startedRow(j.gatedJob, *createdAt, *scheduledAt)
			if tried != nil {
				if err := json.Unmarshal(tried, &triedBefore{row}); err != nil {
					return err
				}
			}
			b.results = append(b.results, Result{JobID: j.ID, Created: !j.Again, Job: row})
		}
		return nil
	})
	if err != nil {
		return b, fault.Failed("jobs", "release", err)
	}
	for _, of := range strayed {
		if err := e.giveBack(ctx, tx, of.tenant, []string{of.id}, "River has the job no longer"); err != nil {
			return b, err
		}
	}
	if e.channel != "" {
		err = e.notify(ctx, tx, b.results)
	}
	return b, err
}

// releasedJob is a job as metered.release_jobs returns it.
type releasedJob struct {
	gatedJob
	Burst bool `json:"burst"` // it stood in two lines
	Again bool `json:"again"` // River has it
}

// triedBefore are the columns of a job that River has tried.
type triedBefore struct{ *rivertype.JobRow }

func (t *triedBefore) UnmarshalJSON(raw []byte) error {
	var row struct {
		Attempt     int
		MaxAttempts int        `json:"max_attempts"`
		AttemptedAt *time.Time `json:"attempted_at"`
		AttemptedBy []string   `json:"attempted_by"`
		Errors      []rivertype.AttemptError
		Metadata    json.RawMessage
	}
	if err := json.Unmarshal(raw, &row); err != nil {
		return err
	}
	t.Attempt, t.MaxAttempts, t.AttemptedAt, t.AttemptedBy, t.Errors, t.Metadata = row.Attempt, row.MaxAttempts, row.AttemptedAt, row.AttemptedBy, row.Errors, row.Metadata
	return nil
}

// limitsNow asks Config.Limits, nil without it.
func (e *Enqueuer) limitsNow(ctx context.Context, tx pgx.Tx, scopes []string, wait int32) (any, error) {
	if e.gate.config.Limits == nil {
		return nil, nil
	}
	var judged []string
	if err := tx.QueryRow(ctx, e.gate.judgedSQL, scopes, wait, releaseBatch).Scan(&judged); err != nil {
		return nil, fault.Failed("jobs", "release", err)
	}
	given := make(map[string]*string, len(judged))
	for _, scope := range judged {
		limits, err := e.gate.config.Limits(ctx, tx, scope)
		if err != nil {
			return nil, err
		}
		given[scope] = nil
		if limits == nil {
			continue
		}
		call, err := inBudget.Charges(inHolds.Ledger(e.gate.book), budget.Charge{Scope: scope, Amount: 1, Limits: limits})
		if err != nil {
			return nil, err
		}
		text := ledger.Limits(call.Charges[0].Limits)
		given[scope] = &text
	}
	encoded, err := json.Marshal(given)
	return string(encoded), err
}

// releaseDue releases and drops a batch of due jobs whose locks are free.
func (e *Enqueuer) releaseDue(ctx context.Context, pool *pgxpool.Pool, report *ReleaseReport) (more bool, busy []string, err error) {
	b, err := e.releaseTx(ctx, pool, nil, report)
	if err != nil {
		return false, nil, err
	}
	dropped, err := e.drop(ctx, pool)
	report.Dropped += int64(dropped)
	return b.more || dropped == dropBatch, b.busy, err
}

// releaseBusy waits for the lock of a line's scope, and releases its jobs.
func (e *Enqueuer) releaseBusy(ctx context.Context, pool *pgxpool.Pool, scope string, report *ReleaseReport) error {
	for {
		b, err := e.releaseTx(ctx, pool, []string{scope}, report)
		if errors.Is(err, ErrBusy) {
			report.Busy++
			return nil
		}
		if err != nil || !b.more {
			return err
		}
	}
}

func (e *Enqueuer) releaseTx(ctx context.Context, pool *pgxpool.Pool, scopes []string, report *ReleaseReport) (b batch, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		b, err = e.releaseIn(ctx, tx, scopes)
		return err
	})
	if err == nil {
		e.count(ctx, "released", int64(len(b.results)), false)
		report.Released += int64(len(b.results))
		report.Troubled += b.troubled
	}
	return b, err
}

// drop drops jobs that have waited for too long.
func (e *Enqueuer) drop(ctx context.Context, pool *pgxpool.Pool) (n int, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, e.gate.dropSQL, dropBatch)
		if err != nil {
			return fault.Failed("jobs", "drop", err)
		}
		var dropped []Parked
		var raw []byte
		var there bool
		seen := 0
		_, err = pgx.ForEachRow(rows, []any{&raw, &there}, func() error {
			if seen++; there {
				dropped = append(dropped, Parked{})
				return dropped[len(dropped)-1].decode(raw)
			}
			return nil
		})
		if err != nil {
			return fault.Failed("jobs", "drop", err)
		}
		for _, p := range dropped {
			if e.gate.config.OnDrop == nil {
				break
			}
			if err := e.gate.config.OnDrop(ctx, tx, p); err != nil {
				return err
			}
		}
		n = seen
		return nil
	})
	if err == nil {
		e.count(ctx, "dropped", int64(n), false)
	}
	return n, err
}

// next is the time until a line or a job is due, at most that long.
func (e *Enqueuer) next(ctx context.Context, pool *pgxpool.Pool, most time.Duration) (time.Duration, error) {
	var us *int64
	if err := pool.QueryRow(ctx, e.gate.nextSQL).Scan(&us); err != nil {
		return 0, fault.Failed("jobs", "next release", err)
	}
	if us == nil {
		return most, nil
	}
	return min(most, time.Duration(*us)*time.Microsecond), nil
}

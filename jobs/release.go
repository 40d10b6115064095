package jobs

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
)

// inBudget is what package budget lends.
var inBudget = lend.Borrow[interface {
	Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
}]("budget")

// ReleaseReport counts jobs and lines: the jobs that wait for one scope.
type ReleaseReport struct {
	// Lost are jobs that were pending in River and stood in no line. They are parked again.
	Lost int64 `json:"lost"`

	// Ended are the holds of jobs that had ended, or that Options.GiveBack gives back.
	Ended int64 `json:"ended"`

	// Released are the jobs that River has now.
	Released int64 `json:"released"`

	// Dropped are the jobs that were dropped after Options.MaxWait.
	Dropped int64 `json:"dropped"`

	// Busy are the lines whose scopes stayed locked.
	Busy int64 `json:"busy"`

	// Troubled are the jobs and lines that failed, and are tried again later: see Parked.Trouble.
	Troubled int64 `json:"troubled"`
}

const (
	releaseBatch = 64 // jobs in a transaction
	dropBatch    = 200
)

const (
	releaseSQL = startsSQL + `
	select pg_catalog.row_number() over () as nth, r.*,
		r.status operator(pg_catalog.=) 'released' and not r.job operator(pg_catalog.?) 'again' as starts
	from metered.release_jobs($2::text[], $3::text::jsonb, $4::int, $5::int, $6::interval,
		$7::metered.origin, $8::text) r` + insertedSQL + `
select a.status, a.job, a.scope, m.created_at, m.scheduled_at` + answeredSQL

	// A job that was tried before has its row in River. It is looked for by a statement of its own:
	// the one that takes jobs out of their lines waits for locks, and reads River's table as it was
	// before. The transaction that parked a job wrote this row, too, so a snapshot of now has both.
	wakeSQL = `
update river_job j set state = 'available', priority = g.priority,
	scheduled_at = least(j.scheduled_at, pg_catalog.now())
from rows from (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::text[]),
	pg_catalog.unnest($3::smallint[])) g(id, hold, priority)
where ` + pendingSQL + `
returning j.id, j.created_at, j.scheduled_at, j.attempt, j.max_attempts, j.attempted_at, j.attempted_by,
	pg_catalog.to_jsonb(j.errors), j.metadata`

	// River's row of a job that was tried before, and waits here for its next attempt.
	pendingSQL = `j.id operator(pg_catalog.=) g.id and j.state operator(pg_catalog.=) 'pending'
	and j.metadata operator(pg_catalog.->>) 'metered:hold' operator(pg_catalog.=) g.hold`

	// For the same reason these follow the statement that took the jobs out of their lines.
	discardSQL = `
update river_job j set state = 'discarded', finalized_at = pg_catalog.now()
from rows from (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::text[])) g(id, hold)
where ` + pendingSQL + ` returning j.id`
	cancelSQL = `
update river_job j set state = 'cancelled', finalized_at = pg_catalog.now()
from rows from (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::text[])) g(id, hold)
where ` + pendingSQL + ` returning j.id`

	judgedSQL = `select metered.judged_scopes($1::text[], $2::int, $3::int)`
	nextSQL   = `select metered.next_release()`

	dropSQL = `select metered.drop_parked($1::int)`
)

// Release does the work of Run once, in its own transactions. Many may run at once. A job that
// cannot be released stops no other: the report counts it as troubled.
func (e *Enqueuer) Release(ctx context.Context, pool *pgxpool.Pool) (ReleaseReport, error) {
	var t tally
	if err := e.gated("pool", pool); err != nil {
		return t.ReleaseReport, err
	}
	var failed error // of one job: the others are released all the same
	if t.Ended, failed = e.endHolds(ctx, pool); ctx.Err() == nil {
		failed = cmp.Or(failed, e.takeStrayed(ctx, pool))
	}
	if ctx.Err() == nil {
		var err error
		t.Lost, err = e.parkLost(ctx, pool)
		failed = cmp.Or(failed, err)
	}
	for more := ctx.Err() == nil; more; {
		var busy []string
		var err error
		if more, busy, err = e.releaseDue(ctx, pool, &t); err != nil {
			return t.ReleaseReport, cmp.Or(failed, err)
		}
		if more {
			continue
		}
		for _, scope := range busy {
			if err := e.releaseBusy(ctx, pool, scope, &t); err != nil {
				return t.ReleaseReport, cmp.Or(failed, err)
			}
		}
	}
	return t.ReleaseReport, failed
}

// tally is a report, and the errors of jobs and lines that it counts as troubled.
type tally struct {
	ReleaseReport
	troubles []error
}

// ReleaseIn releases up to 64 parked jobs that wait for up to 64 scopes and fit by now, in the
// transaction that raises their limit or frees units. It locks the scopes until tx ends, so it
// comes last.
func (e *Enqueuer) ReleaseIn(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Result, error) {
	if err := e.gated("tx", tx); err != nil {
		return nil, err
	}
	if len(scopes) < 1 || len(scopes) > 64 {
		return nil, invalid("scopes", "%d of them: want 1 to 64", len(scopes))
	}
	var b batch
	err := within(ctx, tx, func(tx pgx.Tx) (err error) { b, err = e.releaseIn(ctx, tx, scopes); return err })
	if ofOne(ctx, tx, err) {
		b, err = e.releaseEach(ctx, tx, scopes)
	}
	if err != nil {
		return nil, err
	}
	e.count(ctx, "released", int64(len(b.results)), true)
	e.count(ctx, "troubled", int64(len(b.troubles)), true)
	return b.results, nil
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
	jobs     []*releasedJob
	results  []Result
	more     bool
	busy     []string
	troubles []error // of jobs and lines
}

// releaseIn releases jobs of these scopes, whose locks it waits for, or of all lines that are due,
// for nil.
func (e *Enqueuer) releaseIn(ctx context.Context, tx pgx.Tx, scopes []string) (b batch, err error) {
	if b, err = e.take(ctx, tx, scopes, false); err != nil {
		return b, err
	}
	if err := e.wake(ctx, tx, b.jobs); err != nil {
		return b, err
	}
	return b, e.settle(ctx, tx, &b)
}

// take takes jobs that fit out of their lines, and inserts them, unless each is tried by itself.
func (e *Enqueuer) take(ctx context.Context, tx pgx.Tx, scopes []string, each bool) (b batch, err error) {
	wait := int32(e.wait / time.Millisecond)
	given, unknown, err := e.limitsNow(ctx, tx, scopes, wait, each)
	if err != nil {
		return b, err
	}
	for _, scope := range slices.Sorted(maps.Keys(unknown)) {
		b.troubles = append(b.troubles, fmt.Errorf("jobs: Config.Limits of %q: %w", scope, unknown[scope]))
	}
	probe, err := inBudget.Charges(inHolds.Ledger(e.gate.book), budget.Charge{Scope: "x", Amount: 1})
	if err != nil {
		return b, err
	}
	sql, args := e.gate.releaseSQL, []any{e.gate.riverSchema, scopes, given, wait, releaseBatch,
		probe.Tolerance,
		ledger.Sending{}.Origin(`{"actor": "system"}`), inHolds.Channel(e.gate.book)}
	if each {
		sql, args = e.gate.takenSQL, args[1:]
	}
	rows, err := answer.Query(ctx, tx, sql, args...)
	if err != nil {
		return b, fault.Failed("jobs", "release", err)
	}
	var status string
	var job []byte
	var scope pgtype.Text
	var createdAt, scheduledAt *time.Time
	_, err = pgx.ForEachRow(rows, []any{&status, &job, &scope, &createdAt, &scheduledAt}, func() error {
		switch status {
		case "more":
			b.more = true
		case "busy":
			b.busy = append(b.busy, scope.String)
		case "trouble":
			if unknown[scope.String] == nil {
				b.troubles = append(b.troubles,
					fmt.Errorf("jobs: the line of %q is in trouble: %s", scope.String, job))
			}
		default:
			j, err := readReleased(job, each)
			if err != nil {
				return err
			}
			if createdAt != nil {
				j.row = startedRow(j.gatedJob, *createdAt, *scheduledAt)
			}
			b.jobs = append(b.jobs, j)
		}
		return nil
	})
	return b, fault.Failed("jobs", "release", err)
}

// settle fills in the results. A job that River has no longer has ended.
func (e *Enqueuer) settle(ctx context.Context, tx pgx.Tx, b *batch) error {
	for _, j := range b.jobs {
		if j.row != nil {
			b.results = append(b.results, Result{JobID: j.ID, Created: !j.Again, Job: j.row})
		} else if err := e.gone(ctx, tx, j); err != nil {
			return err
		}
	}
	if e.channel == "" {
		return nil
	}
	return e.notify(ctx, tx, b.results)
}

// gone gives the units of a job back that River has no longer.
func (e *Enqueuer) gone(ctx context.Context, tx pgx.Tx, j *releasedJob) error {
	if j.given {
		return nil
	}
	j.given = true
	own := readMetadata(j.Metadata)
	return e.giveBack(ctx, tx, own.Tenant, []string{own.Hold}, "River has the job no longer")
}

// wake makes the jobs available that River has, and fills in their rows. A job without a row has
// been ended there meanwhile.
func (e *Enqueuer) wake(ctx context.Context, tx pgx.Tx, all []*releasedJob) error {
	again := map[int64]*releasedJob{}
	var ids []int64
	var holds []string
	var priorities []int16
	for _, j := range all {
		if j.Again {
			again[j.ID] = j
			ids, holds = append(ids, j.ID), append(holds, readMetadata(j.Metadata).Hold)
			priorities = append(priorities, int16(j.Priority))
		}
	}
	if len(ids) == 0 {
		return nil
	}
	rows, err := answer.Query(ctx, tx, e.gate.wakeSQL, ids, holds, priorities)
	if err != nil {
		return fault.Failed("jobs", "release", err)
	}
	var id int64
	var row rivertype.JobRow
	var errors []byte
	_, err = pgx.ForEachRow(rows, []any{&id, &row.CreatedAt, &row.ScheduledAt, &row.Attempt, &row.MaxAttempts,
		&row.AttemptedAt, &row.AttemptedBy, &errors, &row.Metadata}, func() error {
		j := again[id]
		j.row = startedRow(j.gatedJob, row.CreatedAt, row.ScheduledAt)
		j.row.Attempt, j.row.MaxAttempts, j.row.Metadata = row.Attempt, row.MaxAttempts,
			bytes.Clone(row.Metadata)
		j.row.AttemptedAt, j.row.AttemptedBy = row.AttemptedAt, row.AttemptedBy
		if errors == nil {
			return nil
		}
		return json.Unmarshal(errors, &j.row.Errors)
	})
	return fault.Failed("jobs", "release", err)
}

// releasedJob is a job as metered.release_jobs returns it.
type releasedJob struct {
	gatedJob
	Burst bool `json:"burst"` // it stood in two lines
	Again bool `json:"again"` // River has it

	raw    []byte
	failed error             // it cannot be read
	row    *rivertype.JobRow // nil: River has it no longer
	given  bool              // and its units were given back
}

// readReleased reads a job. If each is tried by itself, one that cannot be read is one that fails.
func readReleased(raw []byte, each bool) (*releasedJob, error) {
	j := &releasedJob{raw: bytes.Clone(raw)}
	err := json.Unmarshal(raw, j)
	if err == nil || !each {
		return j, err
	}
	var only struct {
		ID int64 `json:"job_id"`
	}
	j = &releasedJob{failed: fmt.Errorf("jobs: read a parked job: %w", err)}
	err = json.Unmarshal(raw, &only)
	j.ID = only.ID
	return j, err
}

// limitsNow asks Config.Limits, nil without it. If each scope is asked by itself, those whose
// limits are not known have the reason in their place, and are in unknown.
func (e *Enqueuer) limitsNow(ctx context.Context, tx pgx.Tx, scopes []string, wait int32,
	each bool) (given any, unknown map[string]error, err error) {
	if e.gate.config.Limits == nil {
		return nil, nil, nil
	}
	var judged []string
	if err := answer.QueryRow(ctx, tx, e.gate.judgedSQL, scopes, wait, releaseBatch).Scan(&judged); err != nil {
		return nil, nil, fault.Failed("jobs", "release", err)
	}
	unknown = map[string]error{}
	all := make(map[string]any, len(judged))
	for _, scope := range judged {
		ask := func(tx pgx.Tx) (err error) { all[scope], err = e.limitsText(ctx, tx, scope); return err }
		if !each {
			err = ask(tx)
		} else if err = within(ctx, tx, ask); err != nil && ofOne(ctx, tx, err) {
			unknown[scope] = err
			all[scope], err = map[string]string{"trouble": shortened(reasonOf(0, err), maxLimitsReason)}, nil
		}
		if err != nil {
			return nil, nil, err
		}
	}
	encoded, err := json.Marshal(all)
	return string(encoded), unknown, err
}

// limitsText are the limits of a scope, nil for those that each job came with.
func (e *Enqueuer) limitsText(ctx context.Context, tx pgx.Tx, scope string) (any, error) {
	limits, err := e.gate.config.Limits(ctx, tx, scope)
	if err != nil || limits == nil {
		return nil, err
	}
	call, err := inBudget.Charges(inHolds.Ledger(e.gate.book),
		budget.Charge{Scope: scope, Amount: 1, Limits: limits})
	if err != nil {
		return nil, err
	}
	return ledger.Limits(ledger.Silent(call.Charges)[0].Limits), nil
}

// releaseDue releases and drops a batch of due jobs whose locks are free.
func (e *Enqueuer) releaseDue(ctx context.Context, pool *pgxpool.Pool,
	t *tally) (more bool, busy []string, err error) {
	b, err := e.releaseTx(ctx, pool, nil, t)
	if err != nil {
		return false, nil, err
	}
	dropped, err := e.drop(ctx, pool, t)
	return b.more || dropped == dropBatch, b.busy, err
}

// releaseBusy waits for the lock of a line's scope, and releases its jobs.
func (e *Enqueuer) releaseBusy(ctx context.Context, pool *pgxpool.Pool, scope string, t *tally) error {
	for {
		b, err := e.releaseTx(ctx, pool, []string{scope}, t)
		if errors.Is(err, fault.ErrBusy) {
			t.Busy++
			return nil
		}
		if err != nil || !b.more {
			return err
		}
	}
}

func (e *Enqueuer) releaseTx(ctx context.Context, pool *pgxpool.Pool, scopes []string,
	t *tally) (b batch, err error) {
	each := false
	err = through(ctx, e.gate.book, pool, func(tx pgx.Tx) error {
		b, err = e.releaseIn(ctx, tx, scopes)
		each = ofOne(ctx, tx, err)
		return err
	})
	if each {
		err = commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			b, err = e.releaseEach(ctx, tx, scopes)
			return err
		})
	}
	if err == nil {
		t.Released += int64(len(b.results))
		e.count(ctx, "released", int64(len(b.results)), false)
		e.trouble(ctx, t, b.troubles)
	}
	return b, err
}

// trouble counts jobs and lines that failed.
func (e *Enqueuer) trouble(ctx context.Context, t *tally, troubles []error) {
	t.Troubled += int64(len(troubles))
	t.troubles = append(t.troubles, troubles...)
	e.count(ctx, "troubled", int64(len(troubles)), false)
}

// drop drops jobs that have waited for too long.
func (e *Enqueuer) drop(ctx context.Context, pool *pgxpool.Pool, t *tally) (n int, err error) {
	each := false
	var troubles []error
	err = commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		n, err = e.dropIn(ctx, tx, dropBatch, new(int64))
		each = ofOne(ctx, tx, err)
		return err
	})
	if each {
		n, troubles, err = e.dropEach(ctx, pool)
	}
	if err == nil {
		t.Dropped += int64(n)
		e.count(ctx, "dropped", int64(n), false)
		e.trouble(ctx, t, troubles)
	}
	return n, err
}

// dropIn drops that many jobs. at is the last that it began with.
func (e *Enqueuer) dropIn(ctx context.Context, tx pgx.Tx, most int, at *int64) (n int, err error) {
	rows, err := answer.Query(ctx, tx, e.gate.dropSQL, most)
	if err != nil {
		return 0, fault.Failed("jobs", "drop", err)
	}
	raws, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		return 0, fault.Failed("jobs", "drop", err)
	}
	all := make([]Parked, len(raws))
	for i, raw := range raws {
		if err := all[i].decode(raw); err != nil {
			return 0, fault.Failed("jobs", "drop", err)
		}
		*at = all[i].JobID
	}
	dropped, err := e.dropped(ctx, tx, all, raws)
	if err != nil {
		return 0, err
	}
	for _, p := range dropped {
		if e.gate.config.OnDrop == nil {
			break
		}
		*at = p.JobID
		if err := e.gate.config.OnDrop(ctx, tx, p); err != nil {
			return 0, err
		}
	}
	return len(raws), nil
}

// dropped are the jobs that were dropped, without those that River has no longer as they were
// parked: they were cancelled there, or tried by hand.
func (e *Enqueuer) dropped(ctx context.Context, tx pgx.Tx, all []Parked, raws [][]byte) ([]Parked, error) {
	var ids []int64
	var holds []string
	for i, p := range all {
		if !p.NotBefore.IsZero() {
			ids, holds = append(ids, p.JobID), append(holds, holdOf(raws[i]))
		}
	}
	if len(ids) == 0 {
		return all, nil
	}
	rows, err := answer.Query(ctx, tx, e.gate.discardSQL, ids, holds)
	if err != nil {
		return nil, fault.Failed("jobs", "drop", err)
	}
	discarded, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	return slices.DeleteFunc(all, func(p Parked) bool {
		return !p.NotBefore.IsZero() && !slices.Contains(discarded, p.JobID)
	}), fault.Failed("jobs", "drop", err)
}

// next is the time until a line or a job is due, at most that long.
func (e *Enqueuer) next(ctx context.Context, pool *pgxpool.Pool, most time.Duration) (time.Duration, error) {
	var us *int64
	if err := answer.QueryRow(ctx, pool, e.gate.nextSQL).Scan(&us); err != nil {
		return 0, fault.Failed("jobs", "next release", err)
	}
	if us == nil {
		return most, nil
	}
	return min(most, time.Duration(*us)*time.Microsecond), nil
}

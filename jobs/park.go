package jobs

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/observe"
)

// park enqueues the jobs of all whose indexes are gated, and fills in their results.
func (e *Enqueuer) park(ctx context.Context, tx pgx.Tx, all []*prepared, gated []int, results []Result) error {
	if len(gated) == 0 {
		return nil
	}
	jobs, err := e.gatedJobs(ctx, tx, all, gated, results)
	if err != nil {
		return err
	}
	if l := all[gated[0]].late; l != nil {
		l.new, l.job = true, jobs[0]
		return nil
	}
	some := all[gated[0]].parking
	sql, args := e.gate.parkSQL, e.parkArgs(jobs, some,
		ledger.Sending{WaitMS: int32(e.wait / time.Millisecond)})
	if slices.ContainsFunc(jobs, func(j gatedJob) bool { return j.ID == 0 }) {
		sql, args = e.gate.parkNewSQL, append(args, e.sequence)
	}
	rows, err := answer.Query(ctx, tx, sql, args...)
	if err != nil {
		return fault.Failed("jobs", "park", err)
	}
	var answer parkAnswer
	var refused error // the first
	parked := int64(0)
	_, err = pgx.ForEachRow(rows, answer.dest(), func() error {
		i := gated[answer.nth-1]
		if err := answer.into(all[i], jobs[answer.nth-1], &results[i]); err != nil && refused == nil {
			refused = err
		}
		if results[i].Parked {
			parked++
		}
		return nil
	})
	e.count(ctx, "parked", parked, true)
	return cmp.Or(e.parkFailed(some, err), refused)
}

// count reports jobs to the observer.
func (e *Enqueuer) count(ctx context.Context, name string, n int64, pending bool) {
	if n > 0 && e.observer != nil {
		e.observer.Event(ctx, observe.Event{Kind: observe.Job, Name: name, N: n, Pending: pending})
	}
}

// parkFailed maps an error of Postgres.
func (e *Enqueuer) parkFailed(of *ledger.Parking, err error) error {
	switch state := sqlstate.Of(err); {
	case err == nil:
		return nil
	case state == sqlstate.LineFull:
		return fullOf(err)
	case state == sqlstate.Exceeded || sqlstate.OfBudget(state):
		return of.Failed(err)
	}
	return fault.Failed("jobs", "park", err)
}

// gatedJob is a job as metered.park_jobs takes it.
type gatedJob struct {
	ID          int64           `json:"job_id"`
	Kind        string          `json:"kind"`
	Queue       string          `json:"queue"`
	Args        json.RawMessage `json:"args"`
	Metadata    json.RawMessage `json:"metadata"`
	Tags        []string        `json:"tags"`
	Priority    int             `json:"priority"`
	MaxAttempts int             `json:"max_attempts"`

	choice
	Burst   *choice `json:"burst,omitempty"`
	Fair    string  `json:"fair"`
	Most    int     `json:"most,omitempty"`
	WaitUS  int64   `json:"wait_us,omitempty"`
	Hopeful bool    `json:"hopeful,omitempty"`
}

const drawIDsSQL = `select pg_catalog.nextval($1::text::regclass) from pg_catalog.generate_series(1, $2::int)`

// gatedJobs has River prepare the jobs. Jobs without a key get their ids from parkNewSQL, or here
// if the end of a command parks them.
func (e *Enqueuer) gatedJobs(ctx context.Context, tx pgx.Tx, all []*prepared, gated []int,
	results []Result) ([]gatedJob, error) {
	var keyless []int
	for _, i := range gated {
		if all[i].key == "" {
			keyless = append(keyless, i)
		}
	}
	if len(keyless) > 0 && all[gated[0]].late == nil {
		for _, i := range keyless {
			results[i] = Result{Created: true}
		}
	} else if len(keyless) > 0 {
		rows, err := answer.Query(ctx, tx, drawIDsSQL, e.sequence, len(keyless))
		if err != nil {
			return nil, fault.Failed("jobs", "draw ids", err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return nil, fault.Failed("jobs", "draw ids", err)
		}
		for n, i := range keyless {
			results[i] = Result{JobID: ids[n], Created: true}
		}
	}
	params := make([]river.InsertManyParams, len(gated))
	for n, i := range gated {
		params[n] = river.InsertManyParams{Args: all[i].args, InsertOpts: &all[i].opts}
	}
	taken := &gatedParams{}
	var err error
	if _, err = e.client.InsertManyTx(context.WithValue(ctx, gatedKey{}, taken), answer.Tx(tx),
		params); err != nil {
		return nil, fmt.Errorf("jobs: insert: %w", err)
	}
	if len(taken.all) != len(gated) {
		abort(ctx, tx)
		return nil, errPlugin
	}
	jobs := make([]gatedJob, len(gated))
	for n, i := range gated {
		p := taken.all[n]
		if p.Kind != all[i].kind || p.Queue != all[i].opts.Queue {
			abort(ctx, tx)
			return nil, errPlugin
		}
		if jobs[n], err = all[i].gated(results[i].JobID, p); err != nil {
			return nil, err
		}
		jobs[n].Hopeful = e.gate.config.Limits != nil
	}
	return jobs, nil
}

func (p *prepared) gated(id int64, params *rivertype.JobInsertParams) (gatedJob, error) {
	metadata, err := withHold(params.Metadata, id, p.retry())
	j := gatedJob{
		ID: id, Kind: params.Kind, Queue: params.Queue, Args: params.EncodedArgs,
		Metadata: metadata, Tags: append([]string{}, params.Tags...),
		Priority: params.Priority, MaxAttempts: params.MaxAttempts,
		choice: choiceOf(p.parking), Fair: p.waits.fair, Most: p.waits.most,
		WaitUS: p.waits.maxWait.Microseconds(),
	}
	if p.burst != nil {
		burst := choiceOf(p.burst)
		j.Burst = &burst
	}
	return j, err
}

// A statement that inserts the jobs that a function of ours lets start, with the privileges of the
// caller, and tells River of them as its own inserts do. River's notice is of the schema in which
// it was sent. The call of the function, and the columns of the answer, stand between.
const (
	startsSQL = `
with asked as materialized (`

	insertedSQL = `
), made as (
	insert into river_job (id, args, kind, max_attempts, metadata, priority, queue, tags)
	select (a.job operator(pg_catalog.->>) 'job_id')::bigint, a.job operator(pg_catalog.->) 'args', a.job operator(pg_catalog.->>) 'kind',
		(a.job operator(pg_catalog.->>) 'max_attempts')::smallint, a.job operator(pg_catalog.->) 'metadata',
		(a.job operator(pg_catalog.->>) 'priority')::smallint, a.job operator(pg_catalog.->>) 'queue',
		array(select pg_catalog.jsonb_array_elements_text(a.job operator(pg_catalog.->) 'tags'))::varchar(255)[]
	from asked a where a.starts
	returning id, created_at, scheduled_at
), said as materialized (
	select pg_catalog.pg_notify(pg_catalog.concat(coalesce(nullif($1::text, ''), pg_catalog.current_schema()), '.river_insert'),
		pg_catalog.json_build_object('queue', q.queue)::text)::text
	from (select distinct a.job operator(pg_catalog.->>) 'queue' as queue, 'application_name' as by from asked a where pg_catalog.jsonb_typeof(a.job) = 'object') q
	where not pg_catalog.starts_with(pg_catalog.current_setting(q.by), 'citus_internal') -- another node may prepare it, which a NOTIFY forbids
)`

	answeredSQL = `
from asked a left join made m on a.starts and m.id = (a.job operator(pg_catalog.->>) 'job_id')::bigint, (select count(*) from said) s
order by a.nth`

	parkSQL = startsSQL + `
	select p.*, p.status = 'started' as starts
	from metered.park_jobs($2::text::jsonb, $3::interval, $4::int, $5::metered.origin, $6::text, $7::bool) p` + insertedSQL + `
select a.nth, a.status, a.refused, a.scope, m.created_at, m.scheduled_at, 0::bigint` + answeredSQL

	// The same for jobs of which some have no id yet.
	parkNewSQL = `
with given as materialized (
	select pg_catalog.jsonb_agg(case when d.id is null then x.job else x.job operator(pg_catalog.||) pg_catalog.jsonb_build_object('job_id', d.id, 'metadata',
		(x.job operator(pg_catalog.->) 'metadata') operator(pg_catalog.||) pg_catalog.jsonb_build_object('metered:hold', pg_catalog.replace(
			x.job operator(pg_catalog.->) 'metadata' operator(pg_catalog.->>) 'metered:hold', 'job/0/', pg_catalog.concat('job/', d.id, '/')))) end order by x.n) as jobs
	from pg_catalog.jsonb_array_elements($2::text::jsonb) with ordinality x(job, n),
		lateral (select case when x.job operator(pg_catalog.->>) 'job_id' = '0' then pg_catalog.nextval($8::text::regclass) end as id) d
), asked as materialized (
	select p.*, p.status = 'started' as starts, (g.jobs operator(pg_catalog.->) (p.nth - 1) operator(pg_catalog.->>) 'job_id')::bigint as id
	from given g, lateral metered.park_jobs(g.jobs, $3::interval, $4::int, $5::metered.origin, $6::text, $7::bool) p` + insertedSQL + `
select a.nth, a.status, a.refused, a.scope, m.created_at, m.scheduled_at, a.id` + answeredSQL
)

func (e *Enqueuer) parkArgs(jobs []gatedJob, some *ledger.Parking, s ledger.Sending) []any {
	encoded, _ := json.Marshal(jobs) // texts, and JSON of River's
	return []any{e.gate.riverSchema, string(encoded), some.Tolerance, s.WaitMS, s.Origin(""),
		some.Channel, s.Raising}
}

// parkAnswer is a row of metered.park_jobs.
type parkAnswer struct {
	nth                  int
	status               string
	refused              []byte
	scope                pgtype.Text
	createdAt, scheduled *time.Time
	id                   int64 // of a job that was sent without one, or 0
}

func (a *parkAnswer) dest() []any {
	return []any{&a.nth, &a.status, &a.refused, &a.scope, &a.createdAt, &a.scheduled, &a.id}
}

// into is the answer as the result of the job, or its refusal.
func (a *parkAnswer) into(p *prepared, j gatedJob, r *Result) error {
	if j.ID == 0 {
		was := readMetadata(j.Metadata).Hold // has random digits, so it stands there once
		now := strings.Replace(was, "job/0/", fmt.Sprintf("job/%d/", a.id), 1)
		j.ID, r.JobID, j.Metadata = a.id, a.id, bytes.Replace(j.Metadata, []byte(was), []byte(now), 1)
	}
	switch a.status {
	case "full":
		return full(a.scope.String, p.waits.most)
	case "refused":
		return p.parking.Refused(a.refused)
	case "parked":
		r.Parked = true
		return nil
	}
	if a.createdAt == nil || a.scheduled == nil {
		return errors.New("jobs: park: the job was not inserted")
	}
	r.Job = startedRow(j, *a.createdAt, *a.scheduled)
	return nil
}

// startedRow is River's row of a job that started.
func startedRow(j gatedJob, createdAt, scheduledAt time.Time) *rivertype.JobRow {
	return &rivertype.JobRow{
		ID: j.ID, EncodedArgs: j.Args, Kind: j.Kind, Queue: j.Queue, Metadata: j.Metadata,
		Tags: j.Tags, Priority: j.Priority, MaxAttempts: j.MaxAttempts,
		State: rivertype.JobStateAvailable, CreatedAt: createdAt.UTC(), ScheduledAt: scheduledAt.UTC(),
	}
}

// fullOf reads a raised MT013.
func fullOf(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != sqlstate.LineFull {
		return nil
	}
	var said struct {
		Scope string
		Most  int
	}
	_ = json.Unmarshal([]byte(pg.Detail), &said)
	return full(said.Scope, said.Most)
}

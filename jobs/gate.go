package jobs

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
)

var inHolds = holds.Internals(lend.Key{})

const (
	maxHolds   = 1000 // jobs with a hold in one EnqueueMany
	maxFair    = 255
	maxWaiting = 3652 * 24 * time.Hour
	maxParked  = 1_000_000_000
)

// gate is the part of an Enqueuer that holds units for jobs.
type gate struct {
	book        *holds.Book // nil: Options.Hold is refused
	config      Config
	name        schema.Name
	riverSchema string

	parkSQL, releaseSQL, judgedSQL, nextSQL, dropSQL, changeSQL, explainSQL, listSQL string
}

func newGate(client *river.Client[pgx.Tx], name schema.Name, config Config) (gate, error) {
	g := gate{book: config.Holds, config: config, name: name, riverSchema: client.Schema()}
	if g.book != nil && inHolds.Schema(g.book) != name {
		return gate{}, invalid("Config.Holds", "is not on the schema %q", name)
	}
	table := pgx.Identifier{"river_job"}
	if g.riverSchema != "" {
		table = pgx.Identifier{g.riverSchema, "river_job"}
	}
	insert := strings.ReplaceAll(insertSQL, "river_job", table.Sanitize())
	g.parkSQL = name.SQL(fmt.Sprintf(insert, parkSQL, parkedColumns))
	g.releaseSQL = name.SQL(fmt.Sprintf(insert, releaseSQL, releasedColumns))
	g.judgedSQL, g.nextSQL, g.dropSQL, g.changeSQL = name.SQL(judgedSQL), name.SQL(nextSQL), name.SQL(dropSQL), name.SQL(changeSQL)
	g.explainSQL, g.listSQL = name.SQL(explainSQL), name.SQL(listSQL)
	return g, nil
}

// waits says how a parked job waits.
type waits struct {
	fair    string
	most    int
	maxWait time.Duration
}

func noWaits(at string, opts *Options) error {
	if opts.Fair != "" || opts.MaxWait != 0 || opts.MaxParked != 0 {
		return invalid(at+"Options.Hold", "is nil: without it no job waits, and Fair, MaxWait and MaxParked mean nothing")
	}
	return nil
}

// fewHolds bounds the work that one call does under its locks.
func fewHolds(all []*prepared) error {
	n := 0
	for _, p := range all {
		if p.parking != nil {
			n++
		}
	}
	if n > maxHolds {
		return invalid("Items", "%d have a Hold: want at most %d", n, maxHolds)
	}
	return nil
}

func (e *Enqueuer) prepareHold(at string, p *prepared, opts *Options) error {
	at += "Options."
	own := river.InsertOpts{}
	if withOpts, ok := p.args.(river.JobArgsWithInsertOpts); ok {
		own = withOpts.InsertOpts()
	}
	switch r := opts.Hold; {
	case e.gate.book == nil:
		return invalid(at+"Hold", "needs Config.Holds")
	case r.Tenant != "" && r.Tenant != opts.Tenant:
		return invalid(at+"Hold.Tenant", "is not Options.Tenant")
	case !p.opts.ScheduledAt.IsZero() || !own.ScheduledAt.IsZero() || p.opts.Pending || own.Pending:
		return invalid(at+"InsertOpts", "with a Hold a job starts when its units fit: neither ScheduledAt nor Pending")
	case isUnique(p.opts.UniqueOpts) || isUnique(own.UniqueOpts):
		return invalid(at+"InsertOpts.UniqueOpts", "cannot be combined with a Hold: use Key")
	case len(opts.Fair) > maxFair || !storable(opts.Fair):
		return invalid(at+"Fair", "want at most %d bytes of UTF-8 without NUL", maxFair)
	case opts.MaxWait < 0 || opts.MaxWait > maxWaiting || opts.MaxWait%time.Microsecond != 0:
		return invalid(at+"MaxWait", "%v is not from 1µs to %v, in whole microseconds", opts.MaxWait, maxWaiting)
	case opts.MaxParked < 0 || opts.MaxParked > maxParked:
		return invalid(at+"MaxParked", "%d is not from 1 to %d", opts.MaxParked, maxParked)
	}
	request := *opts.Hold
	request.Tenant = opts.Tenant
	var err error
	p.parking, err = inHolds.Park(e.gate.book, request)
	if refused := (*fault.Argument)(nil); errors.As(err, &refused) {
		return invalid(at+strings.Replace(refused.Field, "Request.", "Hold.", 1), "%s", refused.Reason)
	}
	p.waits = waits{fair: cmp.Or(opts.Fair, opts.Tenant), most: opts.MaxParked, maxWait: opts.MaxWait}
	return err
}

// park enqueues those of all that gated names, and fills in their results.
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
	rows, err := tx.Query(ctx, e.gate.parkSQL, e.parkArgs(jobs, some, ledger.Sending{WaitMS: int32(e.wait / time.Millisecond)})...)
	if err != nil {
		return fault.Failed("jobs", "park", err)
	}
	var answer parkAnswer
	var refused error // the first
	_, err = pgx.ForEachRow(rows, answer.dest(), func() error {
		i := gated[answer.nth-1]
		if err := answer.into(all[i], jobs[answer.nth-1], &results[i]); err != nil && refused == nil {
			refused = err
		}
		return nil
	})
	return cmp.Or(e.parkFailed(some, err), refused)
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

	Hold    string `json:"hold"`
	Charges string `json:"charges"`
	Fair    string `json:"fair"`
	Most    int    `json:"most,omitempty"`
	WaitUS  int64  `json:"wait_us,omitempty"`
	Hopeful bool   `json:"hopeful,omitempty"`
}

const drawIDsSQL = `select pg_catalog.nextval($1::text::regclass) from pg_catalog.generate_series(1, $2::int)`

// gatedJobs gives the jobs their ids, and has River prepare them.
func (e *Enqueuer) gatedJobs(ctx context.Context, tx pgx.Tx, all []*prepared, gated []int, results []Result) ([]gatedJob, error) {
	var bare []int
	for _, i := range gated {
		if all[i].key == "" {
			bare = append(bare, i)
		}
	}
	if len(bare) > 0 {
		rows, err := tx.Query(ctx, drawIDsSQL, e.sequence, len(bare))
		if err != nil {
			return nil, fault.Failed("jobs", "draw ids", err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return nil, fault.Failed("jobs", "draw ids", err)
		}
		for n, i := range bare {
			results[i] = Result{JobID: ids[n], Created: true}
		}
	}
	params := make([]river.InsertManyParams, len(gated))
	for n, i := range gated {
		params[n] = river.InsertManyParams{Args: all[i].args, InsertOpts: &all[i].opts}
	}
	taken := &gatedParams{}
	if _, err := e.client.InsertManyTx(context.WithValue(ctx, gatedKey{}, taken), tx, params); err != nil {
		return nil, fmt.Errorf("jobs: insert: %w", err)
	}
	if len(taken.all) != len(gated) {
		abort(ctx, tx)
		return nil, ErrPlugin
	}
	jobs := make([]gatedJob, len(gated))
	for n, i := range gated {
		p := taken.all[n]
		if p.Kind != all[i].kind || p.Queue != all[i].opts.Queue {
			abort(ctx, tx)
			return nil, ErrPlugin
		}
		jobs[n] = all[i].gated(results[i].JobID, p)
		jobs[n].Hopeful = e.gate.config.Limits != nil
	}
	return jobs, nil
}

func (p *prepared) gated(id int64, params *rivertype.JobInsertParams) gatedJob {
	return gatedJob{
		ID: id, Kind: params.Kind, Queue: params.Queue, Args: params.EncodedArgs, Metadata: params.Metadata, Tags: append([]string{}, params.Tags...),
		Priority: params.Priority, MaxAttempts: params.MaxAttempts,
		Hold: p.parking.Hold, Charges: ledger.Charges(p.parking.Charges),
		Fair: p.waits.fair, Most: p.waits.most, WaitUS: p.waits.maxWait.Microseconds(),
	}
}

// Internals is internal.
func Internals(lend.Key) internals { return internals{} }

// internals are lent to metered.
type internals struct{}

// Enqueue is Enqueuer.Enqueue in a command. A new job with Options.Hold is left to the call, for the command's end, and its
// result has its id alone. A nil call: all is done.
func (internals) Enqueue(ctx context.Context, e *Enqueuer, tx pgx.Tx, args river.JobArgs, opts *Options) (Result, *ledger.Call[Result], error) {
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
		SQL: e.gate.parkSQL, Locks: p.parking.Locks, Kind: "park",
		Args: func(s ledger.Sending) []any { return e.parkArgs([]gatedJob{j}, p.parking, s) },
		Scan: func(row pgx.Row) (Result, error) {
			var answer parkAnswer
			r := Result{JobID: j.ID, Created: true}
			if err := row.Scan(answer.dest()...); err != nil {
				return r, e.parkFailed(p.parking, err)
			}
			return r, answer.into(p, j, &r)
		},
	}
	return results[0], call, nil
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

// insertSQL inserts the jobs that a function of ours lets start, with the rights of the caller, and tells River of them as its
// own inserts do. River's notice is of the schema in which it was sent.
const insertSQL = `
with asked as materialized (%s
), made as (
	insert into river_job (id, args, kind, max_attempts, metadata, priority, queue, tags)
	select (a.job ->> 'job_id')::bigint, a.job -> 'args', a.job ->> 'kind', (a.job ->> 'max_attempts')::smallint, a.job -> 'metadata',
		(a.job ->> 'priority')::smallint, a.job ->> 'queue', array(select pg_catalog.jsonb_array_elements_text(a.job -> 'tags'))::varchar(255)[]
	from asked a where a.starts
	returning id, created_at, scheduled_at
), said as materialized (
	select pg_catalog.pg_notify(pg_catalog.concat(coalesce(nullif($1::text, ''), pg_catalog.current_schema()), '.river_insert'),
		pg_catalog.json_build_object('queue', q.queue)::text)
	from (select distinct a.job ->> 'queue' as queue from asked a where a.starts) q
)
select %s
from asked a left join made m on a.starts and m.id = (a.job ->> 'job_id')::bigint, (select pg_catalog.count(*) from said) s
order by a.nth`

const (
	parkSQL = `
	select p.*, p.status = 'started' as starts
	from metered.park_jobs($2::text::jsonb, $3::interval, $4::int, $5::metered.origin, $6::text, $7::bool) p`
	parkedColumns = `a.nth, a.status, a.refused, a.scope, m.created_at, m.scheduled_at`
)

func (e *Enqueuer) parkArgs(jobs []gatedJob, some *ledger.Parking, s ledger.Sending) []any {
	encoded, _ := json.Marshal(jobs) // texts, and JSON of River's
	return []any{e.gate.riverSchema, string(encoded), some.Tolerance, s.WaitMS, s.Origin(""), some.Channel, s.Raising}
}

// parkAnswer is a row of metered.park_jobs.
type parkAnswer struct {
	nth                  int
	status               string
	refused              []byte
	scope                pgtype.Text
	createdAt, scheduled *time.Time
}

func (a *parkAnswer) dest() []any {
	return []any{&a.nth, &a.status, &a.refused, &a.scope, &a.createdAt, &a.scheduled}
}

// into is the answer as the result of the job, or its refusal.
func (a *parkAnswer) into(p *prepared, j gatedJob, r *Result) error {
	switch a.status {
	case "full":
		return &FullError{Scope: a.scope.String, MaxParked: p.waits.most}
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
		ID: j.ID, EncodedArgs: j.Args, Kind: j.Kind, Queue: j.Queue, Metadata: j.Metadata, Tags: j.Tags, Priority: j.Priority, MaxAttempts: j.MaxAttempts,
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
	return &FullError{Scope: said.Scope, MaxParked: said.Most}
}

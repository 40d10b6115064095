package inspect

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered/jobs"
)

// Line are the parked jobs that wait for units of one scope.
type Line struct {
	Scope    string        `json:"scope"`
	Waiting  int64         `json:"waiting"`            // jobs
	Oldest   time.Time     `json:"oldest"`             // when the job was parked that waits longest
	Age      time.Duration `json:"age_ns"`             // how long ago that was
	PerHour  float64       `json:"per_hour"`           // jobs of the line that start, over the last hour or two, or since it began
	Due      bool          `json:"due"`                // a releaser is to look at it now
	LookedAt time.Time     `json:"looked_at,omitzero"` // when it is looked at, zero: as soon as units are freed
	Trouble  string        `json:"trouble,omitempty"`  // why the last look failed
}

// Only the lines that are shown pay for their oldest job.
const linesSQL = `
select l.scope, l.waiting, n.clk, coalesce(l.oldest_at, n.clk), l.started, coalesce(l.since, n.clk), l.state = 'due', l.looked_at, coalesce(l.trouble, '')
from (select metered.clock() as clk offset 0) n,
    (select s.scope, s.waiting from (select p.scope, p.waiting from metered.parked_scopes p limit $2) s order by s.waiting desc, s.scope limit $1) x,
    lateral (select * from metered.parked_scopes_words w where w.scope = x.scope limit 1) l
order by l.waiting desc, l.scope`

// Lines returns the longest lines of parked jobs, of MaxLooked.
func (r *Reader) Lines(ctx context.Context, limit int) ([]Line, error) {
	limit, err := pageSize(limit)
	if err != nil {
		return nil, err
	}
	lines, err := collect(ctx, r, linesSQL, scanLine, limit, MaxLooked)
	return lines, failed("lines", err)
}

func scanLine(row pgx.CollectableRow) (l Line, err error) {
	var now, since time.Time
	var started int64
	var at *time.Time
	err = row.Scan(&l.Scope, &l.Waiting, &now, &l.Oldest, &started, &since, &l.Due, &at, &l.Trouble)
	l.Oldest, l.LookedAt, l.Age = l.Oldest.UTC(), moment(at), max(0, now.Sub(l.Oldest))
	if counted := now.Sub(since); counted > 0 {
		l.PerHour = float64(started) / counted.Hours()
	}
	return l, err
}

// Waiting is a parked job in its line.
type Waiting struct {
	Position int64     `json:"position"` // 1 is next
	JobID    int64     `json:"job_id"`   // the id that it will have in River
	Kind     string    `json:"kind"`
	Queue    string    `json:"queue"`
	Key      string    `json:"key,omitempty"` // jobs.Options.Key
	Tenant   string    `json:"tenant,omitempty"`
	Fair     string    `json:"fair,omitempty"`
	Priority int       `json:"priority"`
	Amount   int64     `json:"amount"` // units that it needs of the scope
	ParkedAt time.Time `json:"parked_at"`
	DropAt   time.Time `json:"drop_at,omitzero"`
}

// The columns of the view without its position, which is counted here.
const waitingSQL = `
select pg_catalog.row_number() over (order by j.priority, j.turn, j.job_id), j.job_id, j.kind, j.queue, coalesce(j.key, ''), j.tenant, j.fair,
    j.priority, j.amount, j.parked_at, j.drop_at
from (select w.job_id, w.kind, w.queue, w.key, w.tenant, w.fair, w.priority, w.turn, w.amount, w.parked_at, w.drop_at
    from metered.parked_jobs_words w where w.scope = $1 order by w.priority, w.turn, w.job_id limit $2) j
order by 1`

// Waiting returns the first jobs in the line of a scope.
func (r *Reader) Waiting(ctx context.Context, scope string, limit int) ([]Waiting, error) {
	limit, err := pageSize(limit)
	if err := cmp.Or(err, checkText("scope", scope)); err != nil {
		return nil, err
	}
	all, err := collect(ctx, r, waitingSQL, func(row pgx.CollectableRow) (w Waiting, err error) {
		var drop *time.Time
		err = row.Scan(&w.Position, &w.JobID, &w.Kind, &w.Queue, &w.Key, &w.Tenant, &w.Fair, &w.Priority, &w.Amount, &w.ParkedAt, &drop)
		w.ParkedAt, w.DropAt = w.ParkedAt.UTC(), moment(drop)
		return w, err
	}, scope, limit)
	return all, failed("waiting", err)
}

// Troubled is a parked job whose last try failed.
type Troubled struct {
	JobID    int64     `json:"job_id"` // the id that it will have in River
	Kind     string    `json:"kind"`
	Queue    string    `json:"queue"`
	Key      string    `json:"key,omitempty"` // jobs.Options.Key
	Tenant   string    `json:"tenant,omitempty"`
	Scope    string    `json:"scope,omitempty"` // whose line it is in, "" for none
	Since    time.Time `json:"since"`
	TriedAt  time.Time `json:"tried_at,omitzero"` // when it is tried again
	ParkedAt time.Time `json:"parked_at"`
	Trouble  string    `json:"trouble"` // why its last try failed
}

const troubledSQL = `
select w.job_id, w.kind, w.queue, coalesce(w.key, ''), w.tenant, w.scope, w.troubled_at, w.retry_at, w.parked_at, w.trouble
from metered.parked_jobs_words w where w.trouble is not null and w.lane = 0 order by w.troubled_at, w.job_id limit $1`

// Troubled returns the parked jobs that have been in trouble for longest.
func (r *Reader) Troubled(ctx context.Context, limit int) ([]Troubled, error) {
	limit, err := pageSize(limit)
	if err != nil {
		return nil, err
	}
	all, err := collect(ctx, r, troubledSQL, func(row pgx.CollectableRow) (j Troubled, err error) {
		var since, tried *time.Time
		err = row.Scan(&j.JobID, &j.Kind, &j.Queue, &j.Key, &j.Tenant, &j.Scope, &since, &tried, &j.ParkedAt, &j.Trouble)
		j.ParkedAt, j.Since, j.TriedAt = j.ParkedAt.UTC(), moment(since), moment(tried)
		return j, err
	}, limit)
	return all, failed("troubled", err)
}

// ParkedJob returns a parked job, without its args, with its place in line and the limits that keep
// it, or jobs.ErrNotParked.
func (r *Reader) ParkedJob(ctx context.Context, id int64) (jobs.Parked, error) {
	client, err := river.NewClient(riverpgxv5.New(nil), &river.Config{})
	if err != nil {
		return jobs.Parked{}, err
	}
	enqueuer, err := jobs.New(client, jobs.Config{Schema: r.schema.String(), Holds: r.Book})
	if err != nil {
		return jobs.Parked{}, err
	}
	p, err := enqueuer.Explain(ctx, r.DB, id)
	p.Args = nil
	return p, err
}

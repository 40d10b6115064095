package inspect

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Parked is the state of a job that waits for units of a scope, or for its next attempt. River does
// not know it yet, or has it pending.
const Parked = "parked"

// Job is one of River's jobs, or a parked one, without its args.
type Job struct {
	ID          int64     `json:"id"`
	Gone        bool      `json:"gone,omitempty"` // River has deleted it, it was dropped from its line, or a savepoint took it back: the rest is empty
	Kind        string    `json:"kind,omitempty"`
	Queue       string    `json:"queue,omitempty"`
	State       string    `json:"state,omitempty"`     // River's word, or Parked
	WaitsFor    string    `json:"waits_for,omitempty"` // the scope, of a parked job, empty between attempts
	Position    int64     `json:"position,omitempty"`  // in the line of the scope, of the first three parked jobs: 1 is next
	Attempt     int       `json:"attempt"`
	MaxAttempts int       `json:"max_attempts,omitempty"`
	Priority    int       `json:"priority,omitempty"`
	Created     time.Time `json:"created,omitzero"` // or parked
	Scheduled   time.Time `json:"scheduled,omitzero"`
	Attempted   time.Time `json:"attempted,omitzero"`
	Finalized   time.Time `json:"finalized,omitzero"`
	Error       string    `json:"error,omitempty"` // of its last attempt that failed
	Key         string    `json:"key,omitempty"`   // jobs.Options.Key
	Tenant      string    `json:"tenant,omitempty"`
}

// JobList are jobs by their ids.
type JobList struct {
	Jobs []Job `json:"jobs"`
	// Unreadable says why only the ids are known: there is no such table, or the role may not read
	// it. Else it is "".
	Unreadable string `json:"unreadable,omitempty"`
}

// Lost returns jobs that River has as pending between two attempts, and that stand in no line:
// nobody would start them. jobs.Enqueuer.Run parks them again.
func (r *Reader) Lost(ctx context.Context, limit int) (JobList, error) {
	list := JobList{Jobs: []Job{}}
	limit, err := pageSize(limit)
	if err != nil {
		return list, err
	}
	if list.Unreadable, err = r.unreadable(ctx); err != nil || list.Unreadable != "" {
		return list, err
	}
	ids, err := collect(ctx, r, fmt.Sprintf(lostSQL, r.river), pgx.RowTo[int64], limit)
	if err != nil {
		return list, failed("lost jobs", err)
	}
	return r.Jobs(ctx, ids)
}

// Ours have the id of a hold in their metadata.
const lostSQL = `
select j.id from %s j
where j.state operator(pg_catalog.=) 'pending'
    and j.metadata operator(pg_catalog.?) 'metered:hold' and j.metadata operator(pg_catalog.?) 'metered:retry'
    and not exists (select from metered.parked_jobs_words p where p.job_id operator(pg_catalog.=) j.id)
order by j.id limit $1`

// unreadable says why River's table cannot be read. It looks first: an error would end a
// transaction around this call.
func (r *Reader) unreadable(ctx context.Context) (why string, err error) {
	var there, readable bool
	err = r.row(ctx, readableSQL, r.river).Scan(&there, &readable)
	switch {
	case err != nil:
		return "", failed("jobs", err)
	case !there:
		return "there is no table " + r.river, nil
	case !readable:
		return "the role may not read " + r.river, nil
	}
	return "", nil
}

// Jobs returns the jobs of these ids, up to MaxPage, in this order.
func (r *Reader) Jobs(ctx context.Context, ids []int64) (JobList, error) {
	list := JobList{Jobs: []Job{}}
	if len(ids) == 0 {
		return list, nil
	}
	if len(ids) > MaxPage {
		return list, invalid("ids", "are %d, want at most %d", len(ids), MaxPage)
	}
	found := make(map[int64]Job)
	// Parked jobs first: one that is released meanwhile is seen twice, and River's row is the newer
	// one.
	_, err := collect(ctx, r, parkedSQL, func(row pgx.CollectableRow) (struct{}, error) {
		j := Job{State: Parked}
		err := row.Scan(&j.ID, &j.Kind, &j.Queue, &j.Priority, &j.Created, &j.Key, &j.Tenant, &j.WaitsFor, &j.Position)
		j.Created = j.Created.UTC()
		found[j.ID] = j
		return struct{}{}, err
	}, ids)
	if err != nil {
		return list, failed("jobs", err)
	}
	if list.Unreadable, err = r.unreadable(ctx); err != nil {
		return list, err
	}
	if list.Unreadable == "" {
		_, err := collect(ctx, r, fmt.Sprintf(jobsSQL, r.river), func(row pgx.CollectableRow) (struct{}, error) {
			var j Job
			var attempted, finalized *time.Time
			err := row.Scan(&j.ID, &j.Kind, &j.Queue, &j.State, &j.Attempt, &j.MaxAttempts, &j.Priority, &j.Created, &j.Scheduled, &attempted, &finalized,
				&j.Error, &j.Key, &j.Tenant)
			j.Created, j.Scheduled, j.Attempted, j.Finalized = j.Created.UTC(), j.Scheduled.UTC(), moment(attempted), moment(finalized)
			if p, ok := found[j.ID]; ok && j.State == "pending" { // between two attempts
				j.State, j.WaitsFor, j.Position = p.State, p.WaitsFor, p.Position
			}
			found[j.ID] = j
			return struct{}{}, err
		}, ids)
		if err != nil {
			return list, failed("jobs", err)
		}
	}
	for _, id := range ids {
		j, ok := found[id]
		if !ok {
			j = Job{ID: id, Gone: list.Unreadable == ""}
		}
		list.Jobs = append(list.Jobs, j)
	}
	return list, nil
}

// Positions are counted, so few of them are.
const parkedSQL = `
select j.job_id, j.kind, j.queue, j.priority, j.parked_at, coalesce(j.key, ''), j.tenant, j.scope,
    case when pg_catalog.row_number() over (order by j.job_id) <= 3 and j.scope <> '' then j.position else 0 end
from metered.parked_jobs_words j where j.job_id = any ($1)
order by j.lane desc`

const readableSQL = `
select t.oid is not null, coalesce(pg_catalog.has_table_privilege(t.oid, 'select'), false)
from (select pg_catalog.to_regclass($1)::oid as oid) t`

// jobsSQL is for River's table.
const jobsSQL = `
select j.id, j.kind, j.queue, j.state::text, j.attempt, j.max_attempts, j.priority, j.created_at, j.scheduled_at, j.attempted_at, j.finalized_at,
    coalesce(j.errors[pg_catalog.array_upper(j.errors, 1)] ->> 'error'::text, ''),
    coalesce(j.metadata ->> 'metered:key'::text, ''), coalesce(j.metadata ->> 'metered:tenant'::text, '')
from %s j where j.id = any ($1)`

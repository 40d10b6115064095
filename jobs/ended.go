package jobs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/sqlstate"
)

const (
	endBatch = 64   // holds that one transaction releases
	endLook  = 1000 // holds of jobs that one statement looks at
	// Run looks at the holds of all jobs so often, and for at most this part of its time.
	endPause, endShare = 5 * time.Second, 20
)

// The states of a job that waits for its next attempt.
const betweenAttempts = `(j.state operator(pg_catalog.=) any ('{retryable,scheduled}')
	or j.state operator(pg_catalog.=) 'available' and j.scheduled_at > pg_catalog.now())`

// endedSQL are holds of jobs, and whether River has ended their job or deleted it (ended), or the
// job gives its hold back until its next attempt (rests). A hold and its job are committed
// together, so one statement sees both or neither.
const endedSQL = `
select l.no, l.tenant, l.id, case when l.open then coalesce((
	select case when j.metadata operator(pg_catalog.?) 'metered:retry' and ` + betweenAttempts + ` then 'rests' else '' end from river_job j
	where j.id = pg_catalog.split_part(l.id, '/', 2)::bigint and j.metadata operator(pg_catalog.->>) 'metered:hold' = l.id and j.finalized_at is null), 'ended') else '' end
from (
	select h.no, h.tenant, h.id, h.state = 'h' and h.due > metered.clock() and h.id ~ '^job/[0-9]{1,18}/[0-9a-f]{16}$' as open
	from metered.holds h where h.pending and h.id like 'job/%' and h.no > $1::bigint order by h.no limit $2::int) l
order by l.no`

// lostSQL are jobs that River has as between two attempts of ours, and that stand in no line. A
// transaction that parks such a job or takes it out of its line writes River's row, too, so there
// are none, unless somebody changed a table by hand.
const lostSQL = `
select j.id, j.metadata operator(pg_catalog.->>) 'metered:hold'
from river_job j
where j.state operator(pg_catalog.=) 'pending' and j.id operator(pg_catalog.>) $1::bigint
	and j.metadata operator(pg_catalog.->>) 'metered:hold' operator(pg_catalog.~) '^job/[0-9]{1,18}/[0-9a-f]{16}$'
	and pg_catalog.split_part(j.metadata operator(pg_catalog.->>) 'metered:hold', '/', 2) operator(pg_catalog.=) j.id::text
	and j.metadata operator(pg_catalog.?) 'metered:retry'
	and not exists (select from metered.parked_jobs p where p.job_id operator(pg_catalog.=) j.id)
order by j.id limit $2::int`

// stillLost is the condition under which restSQL parks such a job.
const stillLost = `(j.state operator(pg_catalog.=) 'pending'
	and not exists (select from metered.parked_jobs p where p.job_id operator(pg_catalog.=) j.id))`

// restSQL takes jobs that wait for their next attempt away from River, which does not work pending
// ones, and parks them until then. It returns their holds, which the same transaction releases. A
// job that River has taken since keeps its hold.
const restSQL = `
with given as materialized (
	select g.hold, g.id, pg_catalog.jsonb_build_object('metered:hold', pg_catalog.concat('job/', g.id, '/',
		pg_catalog.right(pg_catalog.md5(pg_catalog.gen_random_uuid()::text), 16))) as next
	from (select h as hold, pg_catalog.split_part(h, '/', 2)::bigint as id from pg_catalog.unnest($1::text[]) h) g
), rests as (
	update river_job j set state = 'pending', metadata = j.metadata operator(pg_catalog.||) g.next from given g
	where j.id = g.id and j.metadata operator(pg_catalog.->>) 'metered:hold' = g.hold
		and j.metadata operator(pg_catalog.?) 'metered:retry' and j.finalized_at is null and ` + betweenAttempts + `
	returning j.*
)
select g.hold from (
	select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object('job_id', j.id, 'kind', j.kind, 'queue', j.queue, 'args', j.args, 'metadata', j.metadata,
		'tags', pg_catalog.to_jsonb(j.tags), 'priority', j.priority, 'max_attempts', j.max_attempts, 'again', true, 'rest_us', least(315576000000000,
			greatest(0, extract(epoch from j.scheduled_at operator(pg_catalog.-) pg_catalog.now()) operator(pg_catalog.*) 1000000))::bigint)
		operator(pg_catalog.||) (j.metadata operator(pg_catalog.->) 'metered:retry')) as jobs
	from rests j having count(*) > 0) r, lateral metered.rest_jobs(r.jobs) rested join given g on g.id = rested`

// strayedSQL are parked jobs that were tried before, and whether River's row of each has changed
// since: the job was cancelled, deleted or tried by hand.
const strayedSQL = `
select p.job_id, p.hold, (select count(*) from river_job j
	where j.id = p.job_id and j.state operator(pg_catalog.=) 'pending' and j.metadata operator(pg_catalog.->>) 'metered:hold' = p.hold) = 0
from (
	select x.job_id, x.job operator(pg_catalog.->) 'metadata' operator(pg_catalog.->>) 'metered:hold' as hold
	from metered.parked_jobs x where x.not_before is not null and x.job_id > $1::bigint order by x.job_id limit $2::int) p
order by p.job_id`

const takeOutSQL = `select metered.change_parked($1::bigint, null, $2::int) operator(pg_catalog.->>) 'hold'`

// ofJob is the hold of a job.
type ofJob struct {
	tenant, id string
	rests      bool // its job waits for its next attempt
}

// endHolds releases the holds of all jobs that have ended, or that give them back.
func (e *Enqueuer) endHolds(ctx context.Context, pool *pgxpool.Pool) (ended int64, err error) {
	var failed error
	for after := int64(0); ; {
		rows, err := answer.Query(ctx, pool, e.gate.endedSQL, after, endLook)
		if err != nil {
			return ended, fault.Failed("jobs", "look for jobs that ended", err)
		}
		var no int64
		var of ofJob
		var state string
		var all []ofJob
		seen := 0
		_, err = pgx.ForEachRow(rows, []any{&no, &of.tenant, &of.id, &state}, func() error {
			if seen++; state != "" {
				of.rests = state == "rests"
				all = append(all, of)
			}
			return nil
		})
		if err != nil {
			return ended, fault.Failed("jobs", "look for jobs that ended", err)
		}
		n, err := e.endAll(ctx, pool, all)
		failed = cmp.Or(failed, err)
		if ended += n; ctx.Err() != nil || seen == 0 {
			return ended, failed
		}
		after = no
	}
}

// endAll releases holds that are still held. A hold whose scope stays locked is left for another
// time.
func (e *Enqueuer) endAll(ctx context.Context, pool *pgxpool.Pool, all []ofJob) (ended int64, err error) {
	type kind struct {
		tenant string
		rests  bool
	}
	kinds := map[kind][]string{}
	for _, of := range all {
		k := kind{of.tenant, of.rests}
		kinds[k] = append(kinds[k], of.id)
	}
	var failed error // of one hold: the others go on
	for k, all := range kinds {
		slices.Sort(all) // a job may have ended twice, after it was tried again by hand
		all = slices.Compact(all)
		for ids := range slices.Chunk(all, endBatch) {
			n, err := e.end(ctx, pool, k.tenant, k.rests, ids)
			if ended += n; err == nil || inTheWay(err) {
				continue
			}
			for _, id := range ids {
				n, err := e.end(ctx, pool, k.tenant, k.rests, []string{id})
				if ended += n; err == nil || overAlready(err) || inTheWay(err) {
					continue
				}
				failed = cmp.Or(failed, fmt.Errorf("the hold %q of a job: %w", id, err))
				if sqlstate.Of(err) == "" { // the connection is lost, or ctx has ended
					return ended, failed
				}
			}
		}
	}
	return ended, failed
}

// takeStrayed takes parked jobs out of their lines whose row of River has changed.
func (e *Enqueuer) takeStrayed(ctx context.Context, pool *pgxpool.Pool) error {
	var failed error
	for after := int64(0); ; {
		rows, err := answer.Query(ctx, pool, e.gate.strayedSQL, after, endLook)
		if err != nil {
			return fault.Failed("jobs", "look for jobs that ended", err)
		}
		var hold string
		var strayed bool
		all := map[int64]string{}
		seen := 0
		_, err = pgx.ForEachRow(rows, []any{&after, &hold, &strayed}, func() error {
			if seen++; strayed {
				all[after] = hold
			}
			return nil
		})
		if err != nil {
			return fault.Failed("jobs", "look for jobs that ended", err)
		}
		for _, id := range slices.Sorted(maps.Keys(all)) {
			if err := e.takeOut(ctx, pool, id, all[id]); err != nil && !inTheWay(err) &&
				!errors.Is(err, ErrNotParked) {
				if failed = cmp.Or(failed, err); sqlstate.Of(err) == "" {
					return failed
				}
			}
		}
		if seen < endLook {
			return failed
		}
	}
}

// parkLost parks jobs again that were lost, one by one.
func (e *Enqueuer) parkLost(ctx context.Context, pool *pgxpool.Pool) (parked int64, err error) {
	var failed error
	for after := int64(0); ; {
		rows, err := answer.Query(ctx, pool, e.gate.lostSQL, after, endLook)
		if err != nil {
			return parked, fault.Failed("jobs", "look for lost jobs", err)
		}
		var hold string
		var all []string
		_, err = pgx.ForEachRow(rows, []any{&after, &hold},
			func() error { all = append(all, hold); return nil })
		if err != nil {
			return parked, fault.Failed("jobs", "look for lost jobs", err)
		}
		for _, hold := range all {
			found, err := e.parkAgain(ctx, pool, hold)
			if failed = cmp.Or(failed, err); ctx.Err() != nil {
				return parked, failed
			}
			parked += found
		}
		if len(all) < endLook {
			return parked, failed
		}
	}
}

func (e *Enqueuer) parkAgain(ctx context.Context, pool *pgxpool.Pool, hold string) (int64, error) {
	tag, err := pool.Exec(ctx, e.gate.parkAgainSQL, []string{hold})
	if err != nil {
		return 0, fmt.Errorf("the job of hold %q is pending and in no line: %w", hold,
			fault.Failed("jobs", "park again", err))
	}
	return tag.RowsAffected(), nil
}

// takeOut takes a job out of its line, if its hold will still be this one.
func (e *Enqueuer) takeOut(ctx context.Context, pool *pgxpool.Pool, id int64, hold string) error {
	return commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		var now *string
		err := answer.QueryRow(ctx, tx, e.gate.takeOutSQL, id, int32(e.wait/time.Millisecond)).Scan(&now)
		if err == nil && (now == nil || *now != hold) {
			return ErrNotParked // it has run since, and may wait for another attempt: roll back
		}
		return fault.Failed("jobs", "take out a job", err)
	})
}

var holdOfJob = regexp.MustCompile(`^job/[0-9]{1,18}/[0-9a-f]{16}$`)

// overAlready reports whether a hold has ended, perhaps before its tenant moved.
func overAlready(err error) bool {
	return errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrUnknown) ||
		errors.Is(err, holds.ErrRetired) || errors.Is(err, fault.ErrMoved)
}

// inTheWay reports whether another transaction was in the way, which will pass.
func inTheWay(err error) bool {
	return errors.Is(err, fault.ErrBusy) || errors.Is(err, fault.ErrSerialization) ||
		sqlstate.Collided(err)
}

// end releases the holds of jobs that ended, or of those that rest by now, and says how many there
// were.
func (e *Enqueuer) end(ctx context.Context, pool *pgxpool.Pool, tenant string, rest bool,
	ids []string) (n int64, err error) {
	err = through(ctx, e.gate.book, pool, func(tx pgx.Tx) error {
		n, err = e.endIn(ctx, tx, tenant, rest, ids)
		return err
	})
	if err != nil {
		n = 0
	}
	return n, err
}

func (e *Enqueuer) endIn(ctx context.Context, tx pgx.Tx, tenant string, rest bool,
	ids []string) (n int64, err error) {
	reason := "the job ended"
	if rest {
		reason = "the job waits for its next attempt"
		rows, err := answer.Query(ctx, tx, e.gate.restSQL, ids)
		if err != nil {
			return 0, fault.Failed("jobs", "rest", err)
		}
		if ids, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return 0, fault.Failed("jobs", "rest", err)
		}
	}
	return int64(len(ids)), e.giveBack(ctx, tx, tenant, ids, reason)
}

// giveBack releases holds of jobs.
func (e *Enqueuer) giveBack(ctx context.Context, tx pgx.Tx, tenant string, ids []string, reason string) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := inHolds.AnyHolder(e.gate.book).Release(ctx, tx,
		holds.Release{Tenant: tenant, IDs: ids, Note: budget.Note{Actor: "system", Reason: reason}})
	return err
}

// ender releases the holds of jobs as they end, until ctx ends: those that client worked at once,
// and the others at its next look.
func (e *Enqueuer) ender(ctx context.Context, pool *pgxpool.Pool, ended func(), failed func(error)) {
	events, stop := e.events()
	defer stop()
	look := time.NewTimer(0)
	defer look.Stop()
	for {
		var n int64
		var err error
		select {
		case <-ctx.Done():
			return
		case event, open := <-events:
			if !open {
				events = nil // the client has stopped
				continue
			}
			n, err = e.endAll(ctx, pool, endedOf(event, events))
		case <-look.C:
			began := time.Now()
			n, err = e.endHolds(ctx, pool)
			err = cmp.Or(err, e.takeStrayed(ctx, pool))
			_, lost := e.parkLost(ctx, pool)
			err = cmp.Or(err, lost)
			look.Reset(max(endPause, endShare*time.Since(began)))
		}
		if n > 0 {
			ended()
		}
		if err != nil {
			failed(err)
		}
	}
}

// endedOf are the holds of jobs that ended, by this event and all that wait behind it.
func endedOf(event *river.Event, events <-chan *river.Event) (all []ofJob) {
	for {
		own := readMetadata(event.Job.Metadata)
		rests := event.Job.FinalizedAt == nil && own.Retry != nil && holdOfJob.MatchString(own.Hold)
		if own.Hold != "" && event.Job.FinalizedAt != nil || rests {
			all = append(all, ofJob{own.Tenant, own.Hold, rests})
		}
		if len(all) == endBatch {
			return all
		}
		select {
		case next, open := <-events:
			if !open {
				return all
			}
			event = next
		default:
			return all
		}
	}
}

// events are those of the client's jobs, nil for a client that works none.
func (e *Enqueuer) events() (events <-chan *river.Event, stop func()) {
	defer func() {
		if recover() != nil { // the only way in which River says so
			events, stop = nil, func() {}
		}
	}()
	return e.client.Subscribe(river.EventKindJobCompleted, river.EventKindJobCancelled,
		river.EventKindJobFailed, river.EventKindJobSnoozed)
}

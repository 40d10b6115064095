package jobs

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
)

const (
	endBatch = 64   // holds that one transaction releases
	endLook  = 1000 // holds of jobs that one statement looks at
	// Run looks at the holds of all jobs so often, and for at most this part of its time.
	endPause, endShare = 5 * time.Second, 20
)

// endedSQL are holds of jobs, and whether River has ended their job or deleted it. A hold and its job are committed together,
// so one statement sees both or neither.
const endedSQL = `
select l.no, l.tenant, l.id, case when l.open then (
	select count(*) from river_job j
	where j.id = pg_catalog.split_part(l.id, '/', 2)::bigint and j.metadata operator(pg_catalog.->>) 'metered:hold' = l.id and j.finalized_at is null) = 0 else false end
from (
	select h.no, h.tenant, h.id, h.state = 'h' and h.due > metered.clock() and h.id ~ '^job/[0-9]{1,18}/[0-9a-f]{16}$' as open
	from metered.holds h where h.pending and h.id like 'job/%' and h.no > $1::bigint order by h.no limit $2::int) l
order by l.no`

// ofJob is the hold of a job.
type ofJob struct{ tenant, id string }

// endHolds releases the holds of all jobs that have ended.
func (e *Enqueuer) endHolds(ctx context.Context, pool *pgxpool.Pool) (ended int64, err error) {
	for after := int64(0); ; {
		rows, err := pool.Query(ctx, e.gate.endedSQL, after, endLook)
		if err != nil {
			return ended, fault.Failed("jobs", "look for jobs that ended", err)
		}
		var no int64
		var of ofJob
		var over bool
		var all []ofJob
		seen := 0
		_, err = pgx.ForEachRow(rows, []any{&no, &of.tenant, &of.id, &over}, func() error {
			if seen++; over {
				all = append(all, of)
			}
			return nil
		})
		if err != nil {
			return ended, fault.Failed("jobs", "look for jobs that ended", err)
		}
		n, err := e.endAll(ctx, pool, all)
		if ended += n; err != nil || seen == 0 {
			return ended, err
		}
		after = no
	}
}

// endAll releases these holds, as far as they are held. A hold whose scope is locked for long is left for another time.
func (e *Enqueuer) endAll(ctx context.Context, pool *pgxpool.Pool, all []ofJob) (ended int64, err error) {
	tenants := map[string][]string{}
	for _, of := range all {
		tenants[of.tenant] = append(tenants[of.tenant], of.id)
	}
	for _, tenant := range slices.Sorted(maps.Keys(tenants)) {
		for ids := range slices.Chunk(tenants[tenant], endBatch) {
			err := e.end(ctx, pool, tenant, ids)
			switch {
			case err == nil:
				ended += int64(len(ids))
				continue
			case inTheWay(err):
				continue
			case !overAlready(err):
				return ended, err
			}
			for _, id := range ids {
				switch err := e.end(ctx, pool, tenant, []string{id}); {
				case err == nil:
					ended++
				case !overAlready(err) && !inTheWay(err):
					return ended, err
				}
			}
		}
	}
	return ended, nil
}

// overAlready reports whether a hold has ended.
func overAlready(err error) bool {
	return errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired)
}

// inTheWay reports whether another transaction was.
func inTheWay(err error) bool { return errors.Is(err, ErrBusy) || errors.Is(err, ErrSerialization) }

func (e *Enqueuer) end(ctx context.Context, pool *pgxpool.Pool, tenant string, ids []string) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		_, err := inHolds.AnyHolder(e.gate.book).Release(ctx, tx, holds.Release{
			Tenant: tenant, IDs: ids, Note: budget.Note{Actor: holds.System, Reason: "the job ended"},
		})
		return err
	})
}

// ender releases the holds of jobs as they end, until ctx ends: those that client worked at once, and the others at its next look.
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

// endedOf are the holds of jobs that ended by this event, and by those that have come behind it.
func endedOf(event *river.Event, events <-chan *river.Event) (all []ofJob) {
	for {
		if id := HoldOf(event.Job); id != "" && event.Job.FinalizedAt != nil {
			all = append(all, ofJob{Tenant(event.Job), id})
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
	return e.client.Subscribe(river.EventKindJobCompleted, river.EventKindJobCancelled, river.EventKindJobFailed)
}

package cells_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// Keys of jobs move along with their tenant, so no key is enqueued twice, whichever cell it is, at each level. Jobs stay where they are, and each is
// worked once, wherever its tenant lives by then. The short form finds keys that do not move (tables without job_keys).
func TestMove_KeyedJobsRunOnceUnderLoad(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	for name, pools := range places(t) {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 3, pools...).withRiver()
			team := w.workers(nil)
			keys := pgtest.Size(6, 150)
			var working sync.WaitGroup
			acts := make(chan bool)
			created := make(chan int64, 4*keys)
			for i := range pgtest.Size(3, 4) {
				working.Go(func() {
					r := w.router()
					for n := range keys {
						key := n
						if i%2 > 0 {
							key = keys - 1 - n // each key comes in another cell again
						}
						acts <- true
						job, opts := keyed("acme", fmt.Sprint("key ", key))
						result, err := enqueue(context.Background(), r, fmt.Sprint(i, "/", key), pgtest.IsolationLevels[pgtest.Random(t).IntN(3)], job, opts)
						if err != nil {
							t.Errorf("%d %d: %v", i, key, err)
						} else if result.Created {
							created <- result.JobID
						}
					}
				})
			}
			go func() { working.Wait(); close(acts) }()
			mover, moves := w.router(), 0
			var moving sync.WaitGroup
			for range acts {
				if moves++; moves%4 == 0 {
					to := moves / 4 % 3
					moving.Wait()
					moving.Go(func() { w.move(mover, "acme", to) })
				}
			}
			moving.Wait()
			w.move(mover, "acme", (w.lives("acme")+1)%3)
			job, opts := keyed("acme", fmt.Sprint("key ", keys))
			keys++ // in another cell than the last one before
			result, err := enqueue(t.Context(), mover, "last", pgx.ReadCommitted, job, opts)
			require.NoError(t, err)
			created <- result.JobID
			require.Len(t, created, keys)
			all := int64(0)
			for i := range w.pools {
				n := w.number(i, `select count(*) from %s.river_job`)
				w.worked(i, n)
				all += n
			}
			require.EqualValues(t, keys, all)
			at := w.lives("acme")
			require.EqualValues(t, keys, w.number(at, `select spent from %s.scopes where scope = 'acme/done'`))
			require.EqualValues(t, keys, w.number(at, `select count(*) from %s.job_keys`))
			cellsOf := map[string]bool{}
			for key := range keys {
				ran := team.where(fmt.Sprint("key ", key))
				require.Len(t, ran, 1, key)
				cellsOf[ran[0]] = true
			}
			require.Greater(t, len(cellsOf), 1, "jobs stay in the cell that enqueued them")
			w.verified()
		})
	}
}

// A key that moved is known in the new cell, with its job, and so is each difference. A key without its tenant would stay behind, and is refused. So is a
// move to a cell where the key is another tenant's.
func TestMove_TakesKeysOfJobsAlong(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t)).withRiver()
	r, stale := w.router(), w.router()
	add := func(r *cells.Router, id string, job chore, opts jobs.Options) (jobs.Result, error) {
		return enqueue(t.Context(), r, id, pgx.ReadCommitted, job, opts)
	}
	job, opts := keyed("acme", "a")
	first, err := add(r, "1", job, opts)
	require.NoError(t, err)
	from := w.lives("acme")
	w.move(r, "acme", 1-from)
	again, err := add(stale, "2", job, opts)
	require.NoError(t, err)
	require.False(t, again.Created)
	require.Equal(t, first.JobID, again.JobID)
	_, err = add(stale, "3", chore{"acme", "other"}, opts)
	require.ErrorIs(t, err, jobs.ErrConflict)
	for _, tenant := range []string{"", "acm", "other"} {
		for _, opts := range []jobs.Options{{Key: "b", Tenant: tenant}, {Hold: slots("acme"), Tenant: tenant}} {
			_, err = add(r, "4", job, opts)
			pgtest.RequireField(t, err, "Options.Tenant", "")
		}
		_, err = add(r, "5"+tenant, job, jobs.Options{Tenant: tenant})
		require.NoError(t, err)
	}
	other := tenantOf(r, from)
	job, opts = keyed(other, "a")
	_, err = add(r, "1", job, opts)
	require.NoError(t, err)
	require.ErrorIs(t, r.Move(t.Context(), cells.Move{Tenant: "acme", To: from}), cells.ErrConflict)
	require.Equal(t, 1-from, w.lives("acme"))
}

// snoozed is a worker's answer that lasts for the test.
func snoozed(context.Context, *team, *river.Job[chore]) error { return river.JobSnooze(time.Hour) }

// A tenant with a job that waits for its units, has them, or gives them back until its next attempt, does not move, whichever names the job has.
func TestMove_WaitsForJobsWithUnits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t)).withRiver()
	r := w.router()
	from := r.First("acme")
	refused := func(why ...string) {
		t.Helper()
		err := w.router().Move(t.Context(), cells.Move{Tenant: "acme", To: 1 - from})
		require.ErrorIs(t, err, cells.ErrOpen)
		require.Equal(t, len(why), strings.Count(err.Error(), "; ")+1, err)
		for _, text := range why {
			require.ErrorContains(t, err, text)
		}
	}
	shared := budget.Charge{Scope: "shared", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1, time.Hour)}}
	add := func(hold *jobs.Units, giveBack bool) (id int64) {
		t.Helper()
		hold.Charges = []budget.Charge{shared}
		in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error { // names of a tenant are not needed here
			result, err := c.Jobs.Enqueue(t.Context(), tx, chore{"acme", "x"}, &jobs.Options{Hold: hold, GiveBack: giveBack})
			id = result.JobID
			return err
		})
		return id
	}
	running := add(slots("acme"), true)
	refused("is that of a job")
	parked := add(slots("acme"), false) // it waits for units of others alone
	refused("waits for shared", "is that of a job")
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		_, err := c.Jobs.CancelParked(t.Context(), tx, parked)
		return err
	})
	team := w.workers(snoozed)
	pgtest.WaitFor(t, "the job to rest", func() bool { return w.number(from, `select count(*) from %s.parked_jobs where scope = ''`) == 1 })
	refused(fmt.Sprintf("job %d waits for its next attempt", running))
	_, err := team.rivers[from].JobCancel(t.Context(), running)
	require.NoError(t, err)
	pgtest.WaitFor(t, "the job to be taken out", func() bool { return w.number(from, `select count(*) from %s.parked_jobs`) == 0 })
	w.move(r, "acme", 1-from)
	require.Zero(t, w.number(from, `select count(*) from %s.ledger where scope like 'acme%%'`))
	w.verified()
}

// heldChore is a job whose args name its hold.
type heldChore struct {
	Hold jobs.HoldRef `json:"hold"`
}

func (heldChore) Kind() string           { return "held_chore" }
func (h heldChore) HeldBy() jobs.HoldRef { return h.Hold }

// A job whose hold has moved along with its tenant is neither cancelled nor worked. It is worked once the tenant is back, and charged once.
func TestMove_AJobWaitsForItsHoldToComeBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t)).withRiver()
	r := w.router()
	from := r.First("acme")
	_, err := do(t.Context(), r, metered.Command{ID: "1", Tenant: "acme", Input: 1}, func(ctx context.Context, tx *metered.Tx) (int, error) {
		id, err := tx.Place(ctx, holds.Placement{Tenant: "acme", ID: "h", TTL: time.Hour, Lines: []holds.Line{{Scope: "acme/gpu", Amount: 10}}}, nil)
		if err == nil {
			_, err = tx.Enqueue(ctx, heldChore{jobs.HoldRef{Tenant: "acme", ID: id}}, nil)
		}
		return 1, err
	})
	require.NoError(t, err)
	w.move(r, "acme", 1-from)
	var moves atomic.Bool // amid the work
	w.workers(nil, func(all *river.Workers) {
		river.AddWorker(all, jobs.NewWorker(w.pools[from], w.client(from, w.pools[from]).Holds,
			func(ctx context.Context, _ *river.Job[heldChore]) (jobs.JobCost, error) {
				if moves.CompareAndSwap(true, false) {
					if err := r.Move(ctx, cells.Move{Tenant: "acme", To: 1 - from}); err != nil {
						return jobs.JobCost{}, err
					}
				}
				return jobs.JobCost{Lines: []holds.Line{{Scope: "acme/gpu", Amount: 3}}}, nil
			}, jobs.WorkerOptions{RetryAfter: 20 * time.Millisecond}))
	})
	snoozes := func(more int64) {
		t.Helper()
		const sql = `select coalesce((metadata ->> 'snoozes')::bigint, 0) from %s.river_job where state <> 'cancelled'`
		before := w.number(from, sql)
		pgtest.WaitFor(t, "the job to wait", func() bool { return w.number(from, sql) >= before+more })
	}
	snoozes(2)
	moves.Store(true)
	w.move(r, "acme", from)
	pgtest.WaitFor(t, "the tenant to move", func() bool { return w.number(from, `select count(*) from %s.ledger`) == 0 })
	snoozes(2)
	w.move(r, "acme", from)
	w.worked(from, 1)
	require.Equal(t, int64(3), w.number(from, `select spent - held from %s.ledger where scope = 'acme/gpu' order by seq desc limit 1`))
	w.verified()
}

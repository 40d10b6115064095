package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// parks parks a job of each scope behind one that runs, and returns their ids.
func (g *gated) parks(scopes ...string) (running, parked []int64) {
	g.t.Helper()
	for _, scope := range scopes {
		running = append(running, g.mustEnqueue(process{"running"}, needs(slots(scope, 1, 1))).JobID)
		r := g.mustEnqueue(process{scope}, needs(slots(scope, 1, 1)))
		require.True(g.t, r.Parked)
		parked = append(parked, r.JobID)
	}
	return running, parked
}

// explained is a parked job.
func (g *gated) explained(id int64) jobs.Parked {
	g.t.Helper()
	p, err := g.Explain(g.ctx, g.pool, id)
	require.NoError(g.t, err)
	return p
}

// River's ids begin again, as after a restore of its tables: two parked jobs have ids of others. They get into trouble by themselves, in
// the caller's transaction too. They are tried again seldom, and start once River has deleted the others.
func TestTrouble_AnIdThatRiverHasStopsNoOtherJob(t *testing.T) {
	t.Parallel()
	for _, level := range append([]pgx.TxIsoLevel{""}, isolationLevels...) {
		g := openGated(t, nil)
		clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
		running, parked := g.parks("a", "b", "c", "d")
		pgtest.Execute(t, g.pool, "truncate river_job restart identity")
		for range 4 {
			g.mustEnqueue(process{"new"}, nil)
		}
		require.Equal(t, []int64{1, 2, 3, 4}, g.river())
		require.Equal(t, []int64{2, 4, 6, 8}, parked)
		require.Equal(t, []int64{1, 3, 5, 7}, running)
		if level == "" {
			require.Equal(t, jobs.ReleaseReport{Ended: 4, Released: 2, Troubled: 2}, g.release())
		} else {
			g.in(level, func(tx pgx.Tx) error {
				ids := pgtest.Value[[]string](t, g.pool, "select array_agg(id) from metered.holds where state = 'h'")
				_, err := g.book.Release(g.ctx, tx, holds.Release{IDs: ids})
				if err != nil {
					return err
				}
				all, err := g.ReleaseIn(g.ctx, tx, "a", "b", "c", "d")
				if err == nil {
					require.Len(t, all, 2)
				}
				return err
			})
		}
		require.Equal(t, []int64{1, 2, 3, 4, 6, 8}, g.river()[:6])
		for _, id := range parked[:2] {
			p := g.explained(id)
			require.Equal(t, fmt.Sprintf("River has another job of the id %d (SQLSTATE 23505)", id), p.Trouble)
			require.Equal(t, clock.Now().Add(10*time.Second), p.LookedAt)
			require.Equal(t, []any{"", int64(0)}, []any{p.Scope, p.Position})
			_, held := g.used([]string{"a", "b"}[id/2-1])
			require.Zero(t, held, "a job in trouble holds nothing")
		}
		require.Equal(t, 2, pgtest.Value[int](t, g.pool, "select count(*) from metered.parked_jobs_words where trouble is not null and retry_at > troubled_at"))
		all, err := g.Parked(g.ctx, g.pool, "", 0, 10)
		require.NoError(t, err)
		require.Equal(t, g.explained(2).Trouble, all[0].Trouble)

		// After 10, 20, 40 … seconds, and at last each hour. None is looked at in between.
		tries := 0
		for range 3600 {
			if g.release().Troubled > 0 {
				tries++
			}
			next := pgtest.Value[int64](t, g.pool, "select metered.next_release()")
			clock.Advance(time.Duration(next) * time.Microsecond)
			if clock.Now().After(pgtest.Tomorrow(9).Add(24 * time.Hour)) {
				break
			}
		}
		require.InDelta(t, 9+23, tries, 3)
		clock.Advance(time.Hour)
		pgtest.Execute(t, g.pool, "delete from river_job where id = 2")
		require.Equal(t, jobs.ReleaseReport{Released: 1, Troubled: 1}, g.release())
		require.Contains(t, g.river(), int64(2))

		// The other is tried at once when it is asked for, or goes for good.
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.Reprioritize(g.ctx, tx, 4, 1); return err })
		require.Empty(t, g.explained(4).Trouble)
		require.Equal(t, jobs.ReleaseReport{Troubled: 1}, g.release())
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			p, err := g.CancelParked(g.ctx, tx, 4)
			require.NotEmpty(t, p.Trouble)
			return err
		})
		require.Equal(t, jobs.ReleaseReport{}, g.release())
		require.Zero(t, g.lines())
		pgtest.RequireVerified(t, g.pool, g.ledger)
	}
}

// A transaction that lost to another is tried again as a whole, and says nothing about its jobs.
func TestTrouble_ASerializationFailureIsNone(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		g := openGated(t, nil)
		running, parked := g.parks("a")
		old := g.begin(level)
		_, err := old.Exec(g.ctx, "select count(*) from river_job")
		require.NoError(t, err)
		g.end(running[0])
		_, err = g.ReleaseIn(g.ctx, old, "a")
		require.ErrorIs(t, err, budget.ErrSerialization)
		require.NoError(t, old.Rollback(g.ctx))
		require.Empty(t, g.explained(parked[0]).Trouble)
		require.Equal(t, jobs.ReleaseReport{Released: 1}, g.release())
	}
}

// River's table refuses some jobs: new ones by a trigger of the user's, or one between two attempts. A whole line of them is passed, too.
func TestTrouble_RiversTableRefusesJobs(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	again := g.mustEnqueue(process{"again"}, givesBack(slots("again", 1, 1)))
	g.fails(again.JobID, 3600)
	require.EqualValues(t, 1, g.release().Ended)
	first := g.mustEnqueue(process{"first"}, needs(slots("gpu", 70, 70)))
	for i := range 70 {
		asset := "bad"
		if i == 35 {
			asset = "good"
		}
		require.True(t, g.mustEnqueue(process{asset}, needs(slots("gpu", 1, 70))).Parked)
	}
	pgtest.Execute(t, g.pool, `create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no % here', new.args ->> 'asset'; end $$;
		create trigger refuse before insert on river_job for each row when (new.args ->> 'asset' = 'bad') execute function refuse();
		create trigger refuse_again before update on river_job for each row when (new.args ->> 'asset' = 'again' and new.state = 'available') execute function refuse()`)
	clock.Advance(time.Hour)
	var heard atomic.Int64
	ctx, stop := context.WithCancel(g.ctx)
	ran := make(chan error, 1)
	go func() {
		ran <- g.Run(ctx, g.pool, func(err error) {
			if strings.Contains(err.Error(), " is in trouble: ") {
				heard.Add(1)
			}
		})
	}()
	g.end(first.JobID)
	pgtest.WaitFor(t, "all but one are in trouble", func() bool {
		return heard.Load() >= 70 && pgtest.Value[int](t, g.pool, "select count(*) from metered.parked_jobs where trouble is not null") == 70
	})
	stop()
	require.ErrorIs(t, <-ran, context.Canceled)
	require.Equal(t, 1, pgtest.Value[int](t, g.pool, `select count(*) from river_job where args ->> 'asset' = 'good'`))
	require.Equal(t, "no again here (SQLSTATE P0001)", g.explained(again.JobID).Trouble)
	require.Equal(t, rivertype.JobStatePending, g.job(again.JobID).State)
	require.Zero(t, g.lines())
	pgtest.Execute(t, g.pool, "drop trigger refuse on river_job; drop trigger refuse_again on river_job")
	clock.Advance(10 * time.Second)
	require.Equal(t, jobs.ReleaseReport{Released: 70}, g.release())
	require.Equal(t, rivertype.JobStateAvailable, g.job(again.JobID).State)
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// What no job could avoid is an error, as ever: jobs are in no trouble where a role may not insert. Row security refuses one alone.
func TestTrouble_AStatementThatNoJobCouldPassIsAnError(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	running, parked := g.parks("a", "b")
	pool := pgtest.AsRole(t, g.pool, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), strings.Replace(riverGrantSQL, "insert, ", "", 1))
	_, err := g.Release(g.ctx, pool)
	require.NoError(t, err)
	g.end(running[0])
	g.end(running[1])
	_, err = g.Release(g.ctx, pool)
	require.ErrorIs(t, err, budget.ErrNotGranted)
	for _, id := range parked {
		require.Empty(t, g.explained(id).Trouble)
	}
	pgtest.Execute(t, g.pool, `alter table river_job enable row level security; create policy no_a on river_job using (true) with check (args ->> 'asset' <> 'a')`)
	app := pgtest.AsRole(t, g.pool, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), riverGrantSQL)
	report, err := g.Release(g.ctx, app)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{Released: 1, Troubled: 1}, report)
	require.Contains(t, g.explained(parked[0]).Trouble, "row-level security")
}

// OnDrop fails for one job, by itself or in SQL: the others are dropped, and that one is tried again.
func TestTrouble_OnDropFailsForOneJob(t *testing.T) {
	t.Parallel()
	var dropped []int64
	bad := int64(0)
	g := openGated(t, func(c *jobs.Config) {
		c.OnDrop = func(ctx context.Context, tx pgx.Tx, p jobs.Parked) error {
			switch p.JobID {
			case bad:
				return errors.New("not this one")
			case bad + 1:
				_, err := tx.Exec(ctx, "select 1 / 0")
				return err
			}
			dropped = append(dropped, p.JobID)
			return nil
		}
	})
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	g.mustEnqueue(process{"running"}, needs(slots("gpu", 1, 1)))
	var all []int64
	for range 5 {
		o := needs(slots("gpu", 1, 1))
		o.MaxWait = time.Minute
		all = append(all, g.mustEnqueue(process{"a"}, o).JobID)
	}
	bad = all[1]
	clock.Advance(time.Minute)
	require.Equal(t, jobs.ReleaseReport{Dropped: 3, Troubled: 2}, g.release())
	require.Equal(t, []int64{all[0], all[3], all[4]}, dropped[len(dropped)-3:])
	require.Equal(t, "not this one", g.explained(bad).Trouble)
	require.Equal(t, "division by zero (SQLSTATE 22012)", g.explained(bad+1).Trouble)
	require.Equal(t, jobs.ReleaseReport{}, g.release())
	require.EqualValues(t, 10_000_000, pgtest.Value[int64](t, g.pool, "select metered.next_release()"))
	clock.Advance(10 * time.Second)
	require.Equal(t, jobs.ReleaseReport{Troubled: 2}, g.release())
	bad = 0
	clock.Advance(time.Hour)
	require.Equal(t, jobs.ReleaseReport{Dropped: 2}, g.release())
	require.Zero(t, g.lines())
}

// A job whose wait is over is dropped though the lines of others are locked.
func TestTrouble_ADropWaitsForNoLockedLine(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	for _, scope := range []string{"locked", "free"} {
		g.mustEnqueue(process{"running"}, needs(slots(scope, 1, 1)))
		for range map[string]int{"locked": 201, "free": 1}[scope] {
			o := needs(slots(scope, 1, 1))
			o.MaxWait = time.Minute
			g.mustEnqueue(process{"a"}, o)
		}
		clock.Advance(time.Second)
	}
	clock.Advance(time.Minute)
	locking := g.begin(pgx.ReadCommitted)
	require.NoError(t, g.ledger.Lock(g.ctx, locking, "locked"))
	require.NoError(t, jobs.Drop(g.ctx, g.Enqueuer, g.pool))
	require.Equal(t, 0, pgtest.Value[int](t, g.pool, "select count(*) from metered.parked_jobs where scope = 'free'"))
	require.NoError(t, locking.Rollback(g.ctx))
}

// Config.Limits fails for one scope, by itself or in SQL: its line and the jobs that also need it wait, and say why. All others go on.
func TestTrouble_LimitsFailForOneScope(t *testing.T) {
	t.Parallel()
	for _, inSQL := range []bool{false, true} {
		failing := true
		g := openGated(t, func(c *jobs.Config) {
			c.Limits = func(ctx context.Context, tx pgx.Tx, scope string) ([]budget.Limit, error) {
				if failing && scope == "bad" && inSQL {
					_, err := tx.Exec(ctx, "select 1 / 0")
					return nil, err
				} else if failing && scope == "bad" {
					return nil, errors.New("no plan")
				}
				return []budget.Limit{budget.Lifetime(1)}, nil
			}
		})
		clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
		running, parked := g.parks("bad", "good", "both")
		both := g.mustEnqueue(process{"both"}, needs(slots("both", 1, 1), slots("bad2", 1, 1), slots("bad", 1, 1)))
		require.True(t, both.Parked)
		for _, id := range running {
			g.end(id)
		}
		require.Equal(t, jobs.ReleaseReport{Released: 2, Troubled: 1}, g.release())
		require.Contains(t, g.river(), parked[1])
		require.Contains(t, g.river(), parked[2])
		p := g.explained(parked[0])
		require.Contains(t, p.Trouble, `limits of "bad": `)
		require.Equal(t, clock.Now().Add(10*time.Second), p.LookedAt)
		require.Equal(t, jobs.ReleaseReport{}, g.release())
		clock.Advance(10 * time.Second)
		require.Equal(t, jobs.ReleaseReport{Troubled: 1}, g.release())
		failing = false
		clock.Advance(10 * time.Second)
		require.Equal(t, jobs.ReleaseReport{Released: 1}, g.release())
		require.Contains(t, g.river(), parked[0])
		p, err := g.Explain(g.ctx, g.pool, both.JobID)
		require.NoError(t, err)
		require.Empty(t, p.Trouble)
	}
}

// A failed job whose id a parked one has keeps its units. All others give theirs back.
func TestTrouble_OneJobThatCannotRestStopsNoOther(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	g.parks("gpu")
	pgtest.Execute(t, g.pool, "truncate river_job restart identity")
	var all []int64
	for i := range 3 {
		all = append(all, g.mustEnqueue(process{"a"}, givesBack(slots(fmt.Sprint("own", i), 1, 1))).JobID)
		g.fails(all[i], 3600)
	}
	require.Equal(t, []int64{1, 2, 3}, all, "2 is parked")
	report, err := g.Release(g.ctx, g.pool)
	require.ErrorContains(t, err, `"job/2/`)
	require.EqualValues(t, 3, report.Ended, "the others, and the one that ran")
	require.EqualValues(t, 1, report.Troubled)
	require.Equal(t, rivertype.JobStateRetryable, g.job(2).State)
	for i, held := range []int64{0, 1, 0} {
		_, now := g.used(fmt.Sprint("own", i))
		require.Equal(t, held, now)
	}
}

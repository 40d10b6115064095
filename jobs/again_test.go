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
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// givesBack is needs with Options.GiveBack.
func givesBack(lines ...holds.Line) *jobs.Options {
	o := needs(lines...)
	o.GiveBack = true
	return o
}

// fails records a failed attempt of a job as River does, whose next one is in so many seconds. Of a soon one River says that it is available: one
// within five seconds, and here within half a minute, in which a busy machine can make the next call.
func (g *gated) fails(id int64, seconds int) {
	g.t.Helper()
	_, err := g.pool.Exec(g.ctx, `update river_job set state = case when $2 > 30 then 'retryable' else 'available' end::river_job_state, attempt = attempt + 1,
		attempted_at = now(), attempted_by = array_append(attempted_by, 'me'), errors = array_append(errors, '{"at": "2026-01-02T03:04:05Z", "attempt": 1, "error": "no", "trace": ""}'),
		scheduled_at = now() + make_interval(secs => $2) where id = $1`, id, seconds)
	require.NoError(g.t, err)
}

// failed records a failed attempt of a job, whose next one may start.
func (g *gated) failed(id int64) {
	g.t.Helper()
	_, err := g.pool.Exec(g.ctx, `update river_job set state = 'retryable', attempt = 1, scheduled_at = now() - interval '1 minute' where id = $1`, id)
	require.NoError(g.t, err)
}

// untilSomebodyWaits returns once a backend waits for a lock.
func (g *gated) untilSomebodyWaits() {
	g.t.Helper()
	pgtest.WaitFor(g.t, "a backend waits for a lock", func() bool {
		return pgtest.Value[int](g.t, g.pool, "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()") > 0
	})
}

func (g *gated) used(scope string) (spent, held int64) {
	g.t.Helper()
	usage, err := g.ledger.Usage(g.ctx, g.pool, budget.Query{Scope: scope})
	require.NoError(g.t, err)
	return usage[0].Spent, usage[0].Held
}

// A job that failed gives its units back at once, which starts another. At River's time it waits in line, and starts again with units of
// its own. River's count of attempts and its errors stay, and what the job was charged once is not charged again.
func TestGiveBack_AFailedJobWaitsInLineForItsNextAttempt(t *testing.T) {
	t.Parallel()
	for _, seconds := range []int{30, 3600} {
		g := openGated(t, nil)
		clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
		o := givesBack(slots("gpu", 1, 1))
		o.Hold.Charges = []budget.Charge{{Scope: "calls", Amount: 3, Limits: []budget.Limit{budget.Lifetime(3)}}}
		o.Tenant, o.MaxWait = "acme", time.Minute
		a := g.mustEnqueue(process{"a"}, o)
		b := g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1)))
		require.True(t, b.Parked)
		first := g.job(a.JobID)
		g.fails(a.JobID, seconds)
		require.Equal(t, jobs.ReleaseReport{Ended: 1, Released: 1}, g.release())
		row := g.job(a.JobID)
		require.Equal(t, rivertype.JobStatePending, row.State)
		require.NotEqual(t, jobs.Of(first).Hold, jobs.Of(row).Hold)
		p, err := g.Explain(g.ctx, g.pool, a.JobID)
		require.NoError(t, err)
		require.WithinDuration(t, clock.Now().Add(time.Duration(seconds)*time.Second), p.NotBefore, 2*time.Minute)
		require.Equal(t, p.NotBefore.Add(time.Minute), p.DropAt)
		require.Equal(t, []string{"", "acme", "acme"}, []string{p.Scope, p.Tenant, p.Fair})
		require.Zero(t, p.Position)
		require.Contains(t, p.Refused[0], `"gpu" has a limit of 1`)
		require.Equal(t, jobs.ReleaseReport{}, g.release())

		clock.Set(p.NotBefore)
		require.Equal(t, jobs.ReleaseReport{}, g.release(), "b has the slot")
		p, err = g.Explain(g.ctx, g.pool, a.JobID)
		require.NoError(t, err)
		require.Equal(t, "gpu", p.Scope)
		require.EqualValues(t, 1, p.Position)
		g.end(b.JobID)
		require.Equal(t, jobs.ReleaseReport{Released: 1}, g.release())
		row = g.job(a.JobID)
		require.Equal(t, rivertype.JobStateAvailable, row.State)
		require.False(t, row.ScheduledAt.After(time.Now()))
		require.Equal(t, []any{1, 25, 1}, []any{row.Attempt, row.MaxAttempts, len(row.Errors)})
		require.Equal(t, `{"asset": "a"}`, string(row.EncodedArgs))
		held, err := g.book.Get(g.ctx, g.pool, "acme", jobs.Of(row).Hold, "")
		require.NoError(t, err)
		require.Equal(t, holds.Held, held.State)
		spent, _ := g.used("calls")
		require.EqualValues(t, 3, spent)
		require.Zero(t, g.lines())
		require.Equal(t, jobs.ReleaseReport{}, g.release())

		_, err = g.pool.Exec(g.ctx, "update river_job set state = 'discarded', finalized_at = now() where id = $1", a.JobID)
		require.NoError(t, err)
		require.Equal(t, jobs.ReleaseReport{Ended: 1}, g.release())
		pgtest.RequireVerified(t, g.pool, g.ledger)
	}
}

// A job that River takes before its hold was given back, or which waits for no attempt, keeps it.
func TestGiveBack_AJobThatRunsOrStartsKeepsItsUnits(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	a := g.mustEnqueue(process{"a"}, givesBack(slots("gpu", 1, 1)))
	keeps := g.mustEnqueue(process{"b"}, needs(slots("other", 1, 1)))
	g.fails(keeps.JobID, 3600)
	for _, sql := range []string{
		"update river_job set state = 'available', scheduled_at = now() where id = $1", "update river_job set state = 'running' where id = $1",
	} {
		_, err := g.pool.Exec(g.ctx, sql, a.JobID)
		require.NoError(t, err)
		require.Equal(t, jobs.ReleaseReport{}, g.release())
	}
	_, held := g.used("gpu")
	require.EqualValues(t, 1, held)

	// River's own statement is first: the job keeps its units, and is not parked.
	g.fails(a.JobID, 3600)
	river := g.begin(pgx.ReadCommitted)
	_, err := river.Exec(g.ctx, "update river_job set state = 'running' where id = $1", a.JobID)
	require.NoError(t, err)
	var report jobs.ReleaseReport
	done := make(chan error, 1)
	go func() {
		var err error
		report, err = g.Release(g.ctx, g.pool)
		done <- err
	}()
	g.untilSomebodyWaits()
	require.NoError(t, river.Commit(g.ctx))
	require.NoError(t, <-done)
	require.Equal(t, jobs.ReleaseReport{}, report)
	_, held = g.used("gpu")
	require.EqualValues(t, 1, held)
	require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"))
}

// A job between two attempts is cancelled here, or in River, or deleted there, or dropped after MaxWait: it holds nothing, is in no line, and
// River has it in an end of its own.
func TestGiveBack_AJobBetweenAttemptsEndsInEachWay(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end   func(g *gated, id int64)
		state rivertype.JobState
	}{
		"cancelled": {func(g *gated, id int64) {
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.CancelParked(g.ctx, tx, id); return err })
		}, rivertype.JobStateCancelled},
		"cancelled by River": {func(g *gated, id int64) {
			_, err := g.client.JobCancel(g.ctx, id)
			require.NoError(g.t, err)
		}, rivertype.JobStateCancelled},
		"deleted by River": {func(g *gated, id int64) {
			_, err := g.client.JobDelete(g.ctx, id)
			require.NoError(g.t, err)
		}, ""},
		"tried by hand": {func(g *gated, id int64) {
			_, err := g.client.JobRetry(g.ctx, id)
			require.NoError(g.t, err)
		}, rivertype.JobStateAvailable},
	} {
		var dropped []jobs.Parked
		g := openGated(t, func(c *jobs.Config) {
			c.OnDrop = func(_ context.Context, _ pgx.Tx, p jobs.Parked) error { dropped = append(dropped, p); return nil }
		})
		clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
		for _, inLine := range []bool{false, true} {
			gpu := slots(fmt.Sprint("gpu in line ", inLine), 1, 1)
			a := g.mustEnqueue(process{"a"}, givesBack(gpu))
			b := g.mustEnqueue(process{"b"}, needs(gpu))
			g.fails(a.JobID, 60)
			require.Equal(t, jobs.ReleaseReport{Ended: 1, Released: 1}, g.release())
			if inLine {
				clock.Advance(time.Hour)
				g.release()
				require.Equal(t, 1, g.lines())
			}
			test.end(g, a.JobID)
			require.Equal(t, jobs.ReleaseReport{}, g.release())
			require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"), name)
			require.Zero(t, g.lines(), name)
			require.Empty(t, dropped)
			if test.state != "" {
				require.Equal(t, test.state, g.job(a.JobID).State, name)
			}
			_, held := g.used(gpu.Scope)
			require.EqualValues(t, 1, held, "b's")
			g.end(b.JobID)
			g.release()
			pgtest.RequireVerified(t, g.pool, g.ledger)
		}
	}
}

func TestGiveBack_DropsAJobThatWaitedTooLongForItsNextAttempt(t *testing.T) {
	t.Parallel()
	var dropped []jobs.Parked
	g := openGated(t, func(c *jobs.Config) {
		c.OnDrop = func(_ context.Context, _ pgx.Tx, p jobs.Parked) error { dropped = append(dropped, p); return nil }
	})
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	o := givesBack(slots("gpu", 1, 1))
	o.MaxWait = time.Minute
	a := g.mustEnqueue(process{"a"}, o)
	g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1)))
	g.fails(a.JobID, 600)
	require.Equal(t, jobs.ReleaseReport{Ended: 1, Released: 1}, g.release())
	p, err := g.Explain(g.ctx, g.pool, a.JobID)
	require.NoError(t, err)
	clock.Set(p.DropAt.Add(-time.Microsecond))
	require.Equal(t, jobs.ReleaseReport{}, g.release())
	clock.Set(p.DropAt)
	require.Equal(t, jobs.ReleaseReport{Dropped: 1}, g.release())
	require.Len(t, dropped, 1)
	require.Equal(t, a.JobID, dropped[0].JobID)
	require.Equal(t, p.NotBefore, dropped[0].NotBefore)
	require.Equal(t, rivertype.JobStateDiscarded, g.job(a.JobID).State)
	require.Zero(t, g.lines())
}

// Nobody is told of a drop whose job River has ended meanwhile.
func TestGiveBack_AJobThatRiverEndedIsNotDropped(t *testing.T) {
	t.Parallel()
	g := openGated(t, func(c *jobs.Config) {
		c.OnDrop = func(context.Context, pgx.Tx, jobs.Parked) error { return errors.New("dropped") }
	})
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	o := givesBack(slots("gpu", 1, 1))
	o.MaxWait = time.Minute
	a := g.mustEnqueue(process{"a"}, o)
	g.fails(a.JobID, 60)
	require.EqualValues(t, 1, g.release().Ended)
	clock.Advance(time.Hour)
	river := g.begin(pgx.ReadCommitted)
	_, err := river.Exec(g.ctx, "update river_job set state = 'cancelled', finalized_at = now() where id = $1", a.JobID)
	require.NoError(t, err)
	var report jobs.ReleaseReport
	done := make(chan error, 1)
	go func() {
		var err error
		report, err = g.Release(g.ctx, g.pool)
		done <- err
	}()
	g.untilSomebodyWaits()
	require.NoError(t, river.Commit(g.ctx))
	require.NoError(t, <-done)
	require.Equal(t, jobs.ReleaseReport{Dropped: 1}, report)
	require.Equal(t, rivertype.JobStateCancelled, g.job(a.JobID).State)
}

// River's row is ended in the same moment in which the job starts again: its units are given back with the start, and start the next.
func TestGiveBack_AJobThatRiverEndedAtItsStartHoldsNothing(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	a := g.mustEnqueue(process{"a"}, givesBack(slots("gpu", 1, 1)))
	g.fails(a.JobID, 60)
	require.Equal(t, jobs.ReleaseReport{Ended: 1}, g.release())
	clock.Advance(time.Hour)
	_, err := g.pool.Exec(g.ctx, "update river_job set state = 'cancelled', finalized_at = now()")
	require.NoError(t, err)
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		results, err := g.ReleaseIn(g.ctx, tx, "gpu")
		require.Empty(t, results)
		return err
	})
	require.Zero(t, g.pending())
	require.Equal(t, rivertype.JobStateCancelled, g.job(a.JobID).State)
	require.Zero(t, g.lines())
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// Its priority is changed while it rests, and River has it then.
func TestGiveBack_IsReprioritized(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	a := g.mustEnqueue(process{"a"}, givesBack(slots("gpu", 1, 1)))
	g.fails(a.JobID, 60)
	require.EqualValues(t, 1, g.release().Ended)
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.Reprioritize(g.ctx, tx, a.JobID, 4); return err })
	clock.Advance(time.Hour)
	require.EqualValues(t, 1, g.release().Released)
	require.Equal(t, 4, g.job(a.JobID).Priority)
}

// Units are freed while the job is in no line, unseen by an old snapshot: the release is to be run again.
func TestGiveBack_ReleasedByAnOldSnapshot(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		g := openGated(t, nil)
		clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
		a := g.mustEnqueue(process{"a"}, givesBack(slots("gpu", 1, 1)))
		g.fails(a.JobID, 60)
		require.EqualValues(t, 1, g.release().Ended)
		b := g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1)))
		require.False(t, b.Parked)
		clock.Advance(time.Hour)
		old := g.begin(level)
		_, err := old.Exec(g.ctx, "select count(*) from river_job")
		require.NoError(t, err)
		g.end(b.JobID)
		results, err := g.ReleaseIn(g.ctx, old, "gpu")
		if level == pgx.ReadCommitted {
			require.NoError(t, err)
			require.Len(t, results, 1)
			continue
		}
		require.ErrorIs(t, err, budget.ErrSerialization)
		require.NoError(t, old.Rollback(g.ctx))
		require.EqualValues(t, 1, g.release().Released)
	}
}

func TestGiveBack_NeedsLines(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	_, err := g.enqueue(process{"a"}, &jobs.Options{GiveBack: true})
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = g.enqueue(process{"a"}, &jobs.Options{GiveBack: true, Hold: &jobs.Units{Charges: []budget.Charge{{Scope: "s", Amount: 1}}}})
	require.ErrorContains(t, err, "GiveBack")
}

// The scope of a job that may be tried again is locked: the releaser goes on, and comes again.
func TestGiveBack_ALockedScopeKeepsNoOtherJobWaiting(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	a, b := g.mustEnqueue(process{"a"}, givesBack(slots("locked", 1, 1))), g.mustEnqueue(process{"b"}, givesBack(slots("gpu", 1, 1)))
	g.fails(a.JobID, 60)
	g.fails(b.JobID, 60)
	require.EqualValues(t, 2, g.release().Ended)
	clock.Advance(time.Hour)
	tx := g.begin(pgx.ReadCommitted)
	_, err := g.ledger.Charge(g.ctx, tx, budget.Charge{Scope: "locked", Amount: 1})
	require.NoError(t, err)
	brief, err := jobs.New(g.client, jobs.Config{Holds: g.book, LockTimeout: 10 * time.Millisecond})
	require.NoError(t, err)
	report, err := brief.Release(g.ctx, g.pool)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{Released: 1, Busy: 1}, report)
	require.NoError(t, tx.Rollback(g.ctx))
	require.Equal(t, jobs.ReleaseReport{Released: 1}, g.release())
}

// River's own workers, its clock and its retries: at most so many run at once, each job is tried as often as it fails, and what waits
// between its attempts holds nothing.
func TestRun_JobsThatFailTakeTurnsInTheSlots(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	var running, most, attempts atomic.Int64
	workers := river.NewWorkers()
	river.AddWorker(workers, &brief{work: func(job *river.Job[process]) error {
		for now := running.Add(1); ; {
			before := most.Load()
			if now <= before || most.CompareAndSwap(before, now) {
				break
			}
		}
		defer running.Add(-1)
		attempts.Add(1)
		switch {
		case job.Args.Asset == "fails" && job.Attempt < 3, job.Args.Asset == "discarded":
			return errors.New("no")
		case job.Args.Asset == "snoozes" && job.CreatedAt.Add(300*time.Millisecond).After(time.Now()):
			return river.JobSnooze(200 * time.Millisecond)
		}
		return nil
	}})
	e, _ := startGated(t, g.pool, g, workers)
	run(t, e, g.pool, func(err error) { t.Error(err) })
	for i := range 16 {
		o := givesBack(slots("gpu", 1, 2))
		o.InsertOpts.MaxAttempts, o.FairKey = 3, fmt.Sprint(i%3)
		g.mustEnqueue(process{[]string{"works", "fails", "discarded", "snoozes"}[i%4]}, o)
	}
	pgtest.WaitFor(t, "all jobs have ended", func() bool { return g.states() == "completed 12, discarded 4" })
	pgtest.WaitFor(t, "all holds have ended", func() bool { return g.pending() == 0 })
	require.LessOrEqual(t, most.Load(), int64(2))
	require.GreaterOrEqual(t, attempts.Load(), int64(4+12+12+4))
	require.Zero(t, g.lines())
	require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"))
	require.Equal(t, 12, pgtest.Value[int](t, g.pool, "select sum(cardinality(errors)) from river_job where state = 'discarded'"))
	require.Greater(t, pgtest.Value[int](t, g.pool, "select count(*) from metered.holds"), 16, "holds were given back")
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// brief is a worker whose jobs are tried again after a third of a second.
type brief struct {
	river.WorkerDefaults[process]
	work func(*river.Job[process]) error
}

func (b *brief) Work(_ context.Context, job *river.Job[process]) error { return b.work(job) }

func (b *brief) NextRetry(*river.Job[process]) time.Time {
	return time.Now().Add(300 * time.Millisecond)
}

// A job comes to rest, and its next attempt may start at once, while a release of its scope waits for the same lock. That one sees the
// parked job, and with it River's row.
func TestGiveBack_AJobThatComesToRestBeforeAReleaseIsNotLost(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	a := g.mustEnqueue(process{"a"}, givesBack(slots("gpu", 1, 1)))
	g.failed(a.JobID)
	locks := g.begin(pgx.ReadCommitted)
	_, err := locks.Exec(g.ctx, "select pg_advisory_xact_lock(metered._scope_key('gpu'))")
	require.NoError(t, err)
	rests, releases := g.begin(pgx.ReadCommitted), g.begin(pgx.ReadCommitted)
	restPID, releasePID := pid(t, rests), pid(t, releases)
	done := make(chan error, 2)
	go func() {
		err := restHolds(g.ctx, g.Enqueuer, rests, "", []string{jobs.Of(a.Job).Hold})
		done <- errors.Join(err, rests.Commit(g.ctx))
	}()
	g.untilBlocked(restPID)
	var results []jobs.Result
	go func() {
		var err error
		results, err = g.ReleaseIn(g.ctx, releases, "gpu")
		done <- errors.Join(err, releases.Commit(g.ctx))
	}()
	g.untilBlocked(releasePID)
	require.NoError(t, locks.Rollback(g.ctx))
	require.NoError(t, errors.Join(<-done, <-done))
	require.Equal(t, rivertype.JobStateAvailable, g.job(a.JobID).State)
	require.Len(t, results, 1)
	require.Equal(t, g.job(a.JobID).Metadata, results[0].Job.Metadata)
	_, held := g.used("gpu")
	require.EqualValues(t, 1, held)
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// A job comes to rest while the statement that drops or cancels it has begun.
func TestGiveBack_AJobThatComesToRestBeforeItsEndIsEnded(t *testing.T) {
	t.Parallel()
	for state, end := range map[rivertype.JobState]func(g *gated, id int64) error{
		rivertype.JobStateDiscarded: func(g *gated, _ int64) error { return jobs.Drop(g.ctx, g.Enqueuer, g.pool) },
		rivertype.JobStateCancelled: func(g *gated, id int64) error {
			return pgx.BeginFunc(g.ctx, g.pool, func(tx pgx.Tx) error { _, err := g.CancelParked(g.ctx, tx, id); return err })
		},
	} {
		var dropped []jobs.Parked
		g := openGated(t, func(c *jobs.Config) {
			c.OnDrop = func(_ context.Context, _ pgx.Tx, p jobs.Parked) error { dropped = append(dropped, p); return nil }
		})
		o := givesBack(slots("gpu", 1, 1))
		o.MaxWait = time.Microsecond
		a := g.mustEnqueue(process{"a"}, o)
		g.failed(a.JobID)
		rests := g.begin(pgx.ReadCommitted)
		_, err := rests.Exec(g.ctx, "lock table metered.parked_jobs in access exclusive mode")
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- end(g, a.JobID) }()
		g.untilSomebodyWaits()
		require.NoError(t, restHolds(g.ctx, g.Enqueuer, rests, "", []string{jobs.Of(a.Job).Hold}))
		_, err = g.book.Place(g.ctx, rests, holds.Placement{ID: "other", TTL: time.Hour, Lines: []holds.Line{slots("gpu", 1, 1)}})
		require.NoError(t, err)
		_, err = g.ReleaseIn(g.ctx, rests, "gpu")
		require.NoError(t, err)
		require.NoError(t, rests.Commit(g.ctx))
		require.NoError(t, <-done, state)
		require.Equal(t, state, g.job(a.JobID).State)
		require.Equal(t, state == rivertype.JobStateDiscarded, len(dropped) == 1)
		require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"))
		require.Equal(t, 1, g.pending(), "the other")
		pgtest.RequireVerified(t, g.pool, g.ledger)
	}
}

// A job that River has as pending between two attempts and that stands in no line is parked again, by each look.
func TestRelease_FindsJobsThatStandInNoLine(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	o := givesBack(slots("gpu", 1, 1))
	o.Tenant, o.Burst = "acme", needs(slots("pool", 1, 1)).Hold
	a := g.mustEnqueue(process{"a"}, o)
	g.fails(a.JobID, 3600)
	require.EqualValues(t, 1, g.release().Ended)
	_, err := g.pool.Exec(g.ctx, "delete from metered.parked_jobs")
	require.NoError(t, err)
	before := jobs.Of(g.job(a.JobID)).Hold
	require.Equal(t, jobs.ReleaseReport{Lost: 1}, g.release())
	require.NotEqual(t, before, jobs.Of(g.job(a.JobID)).Hold)
	p, err := g.Explain(g.ctx, g.pool, a.JobID)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now().Add(time.Hour), p.NotBefore, 5*time.Minute)
	require.Equal(t, 2, pgtest.Count(t, g.pool, "metered.parked_jobs"))
	require.Equal(t, jobs.ReleaseReport{}, g.release())

	_, err = g.pool.Exec(g.ctx, "delete from metered.parked_jobs")
	require.NoError(t, err)
	run(t, g.Enqueuer, g.pool, func(err error) { t.Error(err) })
	pgtest.WaitFor(t, "it is parked again", func() bool { return pgtest.Count(t, g.pool, "metered.parked_jobs") == 2 })
}

// Resting jobs of a scope whose lock somebody keeps, more than a look takes into their lines, keep no other job waiting.
func TestGiveBack_ManyJobsOfALockedScopeKeepNoOtherJobWaiting(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	var items []jobs.Item
	for range 70 {
		items = append(items, jobs.Item{Args: process{"a"}, Options: givesBack(slots("locked", 1, 100))})
	}
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.EnqueueMany(g.ctx, tx, items); return err })
	_, err := g.pool.Exec(g.ctx, "update river_job set state = 'retryable', attempt = 1, scheduled_at = now() + interval '1 hour'")
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{Ended: 70}, g.release())
	other := g.mustEnqueue(process{"b"}, givesBack(slots("gpu", 1, 1)))
	g.fails(other.JobID, 3700)
	require.Equal(t, jobs.ReleaseReport{Ended: 1}, g.release())
	clock.Advance(2 * time.Hour)
	locks := g.begin(pgx.ReadCommitted)
	_, err = locks.Exec(g.ctx, "select pg_advisory_xact_lock(metered._scope_key('locked'))")
	require.NoError(t, err)
	brief, err := jobs.New(g.client, jobs.Config{Holds: g.book, LockTimeout: 10 * time.Millisecond})
	require.NoError(t, err)
	report, err := brief.Release(g.ctx, g.pool)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{Released: 1, Busy: 1}, report)
	require.NoError(t, locks.Rollback(g.ctx))
	require.Equal(t, jobs.ReleaseReport{Released: 70}, g.release())
}

// River tells twice that a job has ended which was tried again by hand. Its hold and all others are released.
func TestRun_AJobThatEndedTwiceKeepsNoOtherHold(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	a := jobs.Of(g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 2))).Job).Hold
	b := jobs.Of(g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 2))).Job).Hold
	n, err := jobs.EndAll(g.ctx, g.Enqueuer, g.pool, a, b, a)
	require.NoError(t, err)
	require.EqualValues(t, 2, n)
	require.Zero(t, g.pending())
}

// Notices that nobody of the library sent cost few looks, and a job starts at once all the same.
func TestRun_NoticesOfAStrangerCostFewLooks(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	first := g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	second := g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1)))
	type wait struct {
		atLeast time.Duration
		over    chan time.Time
	}
	asked, stopped := make(chan wait), make(chan struct{})
	jobs.Apart(g.Enqueuer, func(atLeast time.Duration) <-chan time.Time {
		over := make(chan time.Time, 1)
		select {
		case asked <- wait{atLeast, over}: // and then Run looks when the test says that the time is over
		case <-stopped:
			close(over)
		}
		return over
	})
	var looks atomic.Int64
	counted := pgtest.Reopen(t, g.pool, func(c *pgxpool.Config) { c.ConnConfig.Tracer = counts{"release_jobs", &looks} })
	run(t, g.Enqueuer, counted, func(err error) { t.Error(err) })
	pgtest.WaitFor(t, "Run listens", func() bool {
		return pgtest.Value[int](t, g.pool, "select count(*) from pg_stat_activity where query like 'listen %' and datname = current_database()") > 0
	})
	// Each look that a notice causes waits, twice as long as the one before. The looks that Run makes by itself double the wait, too.
	least := 5 * time.Millisecond
	for range 8 {
		var heard wait
		pgtest.WaitFor(t, "Run has heard a notice, and waits", func() bool {
			pgtest.Execute(t, g.pool, "select pg_notify('metered_parked', '')")
			select {
			case heard = <-asked:
				return true
			case <-time.After(20 * time.Millisecond):
				return false
			}
		})
		require.GreaterOrEqual(t, heard.atLeast, least)
		least = min(2*least, 200*time.Millisecond)
		before := looks.Load()
		for range 20 {
			pgtest.Execute(t, g.pool, "select pg_notify('metered_parked', '')")
		}
		require.LessOrEqual(t, looks.Load(), before+1, "none while it waits, but for one of its own")
		heard.over <- time.Time{}
	}
	require.Equal(t, 200*time.Millisecond, least)
	close(stopped)
	g.end(first.JobID)
	pgtest.WaitFor(t, "the job starts", func() bool { return contains(g.river(), second.JobID) })
}

// counts counts statements that contain a text.
type counts struct {
	text string
	n    *atomic.Int64
}

func (c counts) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	if strings.Contains(query.SQL, c.text) {
		c.n.Add(1)
	}
	return ctx
}

func (counts) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// restHolds is a step that the package lends to its siblings.
var restHolds = lend.Borrow[interface {
	Rest(ctx context.Context, e *jobs.Enqueuer, tx pgx.Tx, tenant string, ids []string) error
}]("jobs").Rest

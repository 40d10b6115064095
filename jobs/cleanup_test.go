package jobs_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// reserved is a hold of a seat for a minute, with a cleanup job, a clock that stands still, and workers.
type reserved struct {
	pool    *pgxpool.Pool
	c       *metered.Client
	clock   *pgtest.Clock
	job     int64
	expired atomic.Int64 // how often subscribers heard that it expired
	fail    atomic.Int64 // how often they are to fail
}

func reserve(t *testing.T) *reserved {
	t.Helper()
	s := &reserved{}
	s.pool, s.c = setUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(ctx context.Context, tx pgx.Tx, tr holds.Transition) error {
			if tr.Kind != holds.EventExpired {
				return nil
			}
			if s.fail.Add(-1) >= 0 {
				return errOwn
			}
			s.expired.Add(1)
			_, err := tx.Exec(ctx, `insert into uploads values ($1)`, tr.Hold.ID)
			return err
		},
	}}})
	s.clock = pgtest.SetClock(t, s.pool, time.Now())
	r := holds.Placement{ID: "h", Tenant: "acme", TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 1)}}
	_, err := metered.Do(t.Context(), s.c, metered.Command{ID: "op", Input: 1}, func(ctx context.Context, tx *metered.Tx) (string, error) {
		return tx.Place(ctx, r, &jobs.Cleanup{Delay: 7 * time.Second})
	})
	require.NoError(t, err)
	s.job = pgtest.Value[int64](t, s.pool, `select id from river_job`)
	workers := river.NewWorkers()
	river.AddWorker(workers, jobs.NewCleanupWorker(s.pool, s.c.Holds))
	startWorkers(t, s.pool, workers)
	return s
}

// runNow has River run a job before its time.
func (s *reserved) runNow(t *testing.T, job int64) {
	t.Helper()
	_, err := s.pool.Exec(t.Context(), `update river_job set state = 'available', scheduled_at = now() where id = $1`, job)
	require.NoError(t, err)
}

// again enqueues and runs another job for the hold.
func (s *reserved) again(t *testing.T, tenant, id string) {
	t.Helper()
	var job jobs.Result
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) (err error) {
		job, err = s.c.Jobs.Enqueue(t.Context(), tx, jobs.CleanupArgs{Tenant: tenant, ID: id}, nil)
		return err
	}))
	awaitJob(t, s.pool, job.JobID, "completed")
}

func (s *reserved) inTx(t *testing.T, do func(tx pgx.Tx) error) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, do))
}

// requireSnoozed waits until the job was put off by d, with no attempt counted.
func (s *reserved) requireSnoozed(t *testing.T, d time.Duration) {
	t.Helper()
	awaitJob(t, s.pool, s.job, "scheduled")
	// attempted_at is River's clock before the job runs, and scheduled_at the same clock's after it, and d.
	off := pgtest.Value[time.Duration](t, s.pool, `select scheduled_at - attempted_at from river_job where id = $1`, s.job)
	require.GreaterOrEqual(t, off, d)
	require.Less(t, off, d+time.Minute)
	require.Zero(t, pgtest.Value[int](t, s.pool, `select attempt from river_job where id = $1`, s.job))
	require.Zero(t, s.expired.Load())
}

func (s *reserved) state(t *testing.T) holds.State {
	t.Helper()
	h, err := s.c.Holds.Get(t.Context(), s.pool, "acme", "h", "")
	require.NoError(t, err)
	return h.State
}

func TestCleanup_IsEnqueuedForAfterTheHoldIsDue(t *testing.T) {
	t.Parallel()
	s := reserve(t)
	require.Equal(t, "scheduled", pgtest.Value[string](t, s.pool, `select state::text from river_job`))
	after := pgtest.Value[time.Duration](t, s.pool, `select scheduled_at - created_at from river_job`) // one clock's, a moment apart
	require.InDelta(t, (time.Minute + 7*time.Second).Seconds(), after.Seconds(), 30)
	require.Equal(t, "acme", pgtest.Value[string](t, s.pool, `select metadata->>'metered:tenant' from river_job`))
}

func TestCleanup_FreesAndAnnouncesOnce(t *testing.T) {
	t.Parallel()
	s := reserve(t)
	s.clock.Advance(time.Minute)
	s.runNow(t, s.job)
	awaitJob(t, s.pool, s.job, "completed")
	require.Equal(t, int64(1), s.expired.Load())
	require.Equal(t, 1, pgtest.Value[int](t, s.pool, "select count(*) from uploads"), "the subscriber's write in the transaction")
	history, err := s.c.Holds.History(t.Context(), s.pool, "acme", "h", "")
	require.NoError(t, err)
	require.Equal(t, []holds.EventKind{holds.EventPlaced, holds.EventExpired}, []holds.EventKind{history[0].Kind, history[1].Kind})
	require.Equal(t, "job:metered_hold_cleanup", history[1].Note.Actor)
	require.Zero(t, pgtest.Value[int64](t, s.pool, `select held from metered.ledger where scope = 'seat' order by seq desc limit 1`))

	s.again(t, "acme", "h")
	require.Equal(t, int64(1), s.expired.Load())
	require.Equal(t, 2, pgtest.Value[int](t, s.pool, `select count(*) from metered.hold_events`))
}

// Somebody else has taken the seat in the meantime, and so seen the expiry through: it is announced all the same, once,
// and the new hold is left alone.
func TestCleanup_AnnouncesHoldsThatAnotherPlacementEnded(t *testing.T) {
	t.Parallel()
	s := reserve(t)
	s.clock.Advance(time.Minute)
	s.inTx(t, func(tx pgx.Tx) error {
		_, err := s.c.Holds.Place(t.Context(), tx, holds.Placement{ID: "h2", Tenant: "acme", TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 1)}})
		return err
	})
	require.Zero(t, s.expired.Load())
	s.runNow(t, s.job)
	awaitJob(t, s.pool, s.job, "completed")
	require.Equal(t, int64(1), s.expired.Load())
	h, err := s.c.Holds.Get(t.Context(), s.pool, "acme", "h2", "")
	require.NoError(t, err)
	require.Equal(t, holds.Held, h.State)
	require.Equal(t, int64(1), pgtest.Value[int64](t, s.pool, `select held from metered.ledger where scope = 'seat' order by seq desc limit 1`))
}

func TestCleanup_DoesNothingToAHoldThatHasEndedOrIsUnknown(t *testing.T) {
	t.Parallel()
	for state, end := range map[holds.State]func(s *reserved, tx pgx.Tx) error{
		holds.Captured: func(s *reserved, tx pgx.Tx) error {
			_, err := s.c.Holds.Capture(t.Context(), tx, holds.Capture{Tenant: "acme", IDs: []string{"h"}, All: true})
			return err
		},
		holds.Released: func(s *reserved, tx pgx.Tx) error {
			_, err := s.c.Holds.Release(t.Context(), tx, holds.Release{Tenant: "acme", IDs: []string{"h"}})
			return err
		},
	} {
		s := reserve(t)
		s.inTx(t, func(tx pgx.Tx) error { return end(s, tx) })
		s.clock.Advance(time.Hour)
		events := pgtest.Value[int](t, s.pool, "select count(*) from "+"metered.hold_events")
		s.runNow(t, s.job)
		awaitJob(t, s.pool, s.job, "completed")
		s.again(t, "acme", "h")
		require.Equal(t, state, s.state(t))
		require.Equal(t, events, pgtest.Value[int](t, s.pool, "select count(*) from "+"metered.hold_events"))
		require.Zero(t, s.expired.Load())
	}
	s := reserve(t)
	s.again(t, "acme", "unknown")
	s.again(t, "acme", metered.NewID())
	s.clock.Advance(time.Hour)
	s.again(t, "another", "h") // another tenant's is unknown
	require.Zero(t, s.expired.Load())

	s.inTx(t, func(tx pgx.Tx) error { // purged, and so retired
		_, _, err := s.c.Holds.Expire(t.Context(), tx, holds.Expire{Tenant: "acme", ID: "h", Deadline: s.deadline(t)})
		return err
	})
	_, err := s.pool.Exec(t.Context(), `delete from metered.hold_events; delete from metered.hold_lines; delete from metered.holds`)
	require.NoError(t, err)
	s.runNow(t, s.job)
	awaitJob(t, s.pool, s.job, "completed")
}

func (s *reserved) deadline(t *testing.T) time.Time {
	t.Helper()
	h, err := s.c.Holds.Get(t.Context(), s.pool, "acme", "h", "")
	require.NoError(t, err)
	return h.Deadline
}

func TestCleanup_TooEarlyOrAfterAnExtensionComesAgain(t *testing.T) {
	t.Parallel()
	s := reserve(t)
	s.clock.Advance(20 * time.Second)
	s.runNow(t, s.job) // early, by the database's clock
	s.requireSnoozed(t, 40*time.Second+7*time.Second)
	require.Equal(t, holds.Held, s.state(t))

	s.inTx(t, func(tx pgx.Tx) error {
		_, err := s.c.Holds.Extend(t.Context(), tx, holds.Extend{Tenant: "acme", IDs: []string{"h"}, By: 10 * time.Minute})
		return err
	})
	s.clock.Advance(40 * time.Second) // its first deadline
	s.runNow(t, s.job)
	s.requireSnoozed(t, 10*time.Minute+7*time.Second)
	require.Equal(t, holds.Held, s.state(t))

	s.clock.Advance(10 * time.Minute)
	s.runNow(t, s.job)
	awaitJob(t, s.pool, s.job, "completed")
	require.Equal(t, int64(1), s.expired.Load())
	require.Equal(t, holds.Expired, s.state(t))
}

// A subscriber that fails takes the announcement back, and the job is tried again.
func TestCleanup_IsTriedAgainWhenASubscriberFails(t *testing.T) {
	t.Parallel()
	s := reserve(t)
	s.fail.Store(1)
	s.clock.Advance(time.Minute)
	s.runNow(t, s.job)
	awaitJob(t, s.pool, s.job, "completed")
	require.Equal(t, int64(1), s.expired.Load())
	require.Equal(t, 2, pgtest.Value[int](t, s.pool, `select attempt from river_job where id = $1`, s.job))
	require.Equal(t, 1, pgtest.Value[int](t, s.pool, "select count(*) from uploads"))
}

// A job of its own queue is given up after its number of attempts, and the units that it was to free are free.
func TestCleanup_IsTriedAsOftenAsItSaysInItsQueue(t *testing.T) {
	t.Parallel()
	s := reserve(t)
	place := func(id string, c jobs.Cleanup) (job int64, err error) {
		r := holds.Placement{ID: id, Tenant: "acme", TTL: time.Minute, Lines: []holds.Line{room("seat "+id, 1, 1)}}
		_, err = metered.Do(t.Context(), s.c, metered.Command{ID: id, Input: 1}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			return tx.Place(ctx, r, &c)
		})
		if err == nil {
			job = pgtest.Value[int64](t, s.pool, `select max(id) from river_job`)
		}
		return job, err
	}
	job, err := place("elsewhere", jobs.Cleanup{Queue: "cleanup", MaxAttempts: 7})
	require.NoError(t, err)
	require.Equal(t, "cleanup 7", pgtest.Value[string](t, s.pool, `select queue || ' ' || max_attempts from river_job where id = $1`, job))
	require.Equal(t, 25, pgtest.Value[int](t, s.pool, `select max_attempts from river_job where id = $1`, s.job))
	for _, wrong := range []int{-1, 32_768} {
		_, err = place("wrong", jobs.Cleanup{MaxAttempts: wrong})
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
		require.Equal(t, "Cleanup.MaxAttempts", argument.Field)
	}
	job, err = place("once", jobs.Cleanup{MaxAttempts: 1})
	require.NoError(t, err)
	s.fail.Store(9)
	s.clock.Advance(time.Minute)
	s.runNow(t, job)
	awaitJob(t, s.pool, job, "discarded")
	usage, err := s.c.Budget.Usage(t.Context(), s.pool, budget.Query{Scope: "seat once"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Held)
}

// A claim that its holder makes again keeps its id. The cleanup job of the id that was not made finds nothing.
func TestCleanup_OfAClaimThatTheHolderHadAlready(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	claim := holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann", TTL: time.Minute}
	for _, op := range []string{"op1", "op2"} {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: op, Input: 1}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			return tx.Claim(ctx, claim, &jobs.Cleanup{})
		})
		require.NoError(t, err)
	}
	clock.Advance(time.Minute)
	workers := river.NewWorkers()
	river.AddWorker(workers, jobs.NewCleanupWorker(pool, c.Holds))
	startWorkers(t, pool, workers)
	_, err := pool.Exec(t.Context(), `update river_job set state = 'available', scheduled_at = now()`)
	require.NoError(t, err)
	pgtest.WaitFor(t, "both jobs to be completed", func() bool {
		return pgtest.Value[int](t, pool, `select count(*) from river_job where state = 'completed'`) == 2
	})
	require.Equal(t, 2, pgtest.Value[int](t, pool, "select count(*) from "+"metered.hold_events")) // placed, expired
}

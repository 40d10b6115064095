package feedjobs_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/budget/feedjobs"
	"github.com/pgmetered/metered/internal/pgtest"
)

type setup struct {
	*testing.T
	pool   *pgxpool.Pool
	ledger *budget.Ledger
}

func open(t *testing.T) *setup {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	return &setup{t, pgtest.Open(t), ledger}
}

func (s *setup) charge(scopes ...string) {
	for _, scope := range scopes {
		_, err := s.ledger.ChargeNow(s.Context(), s.pool, budget.Charge{Scope: scope, Amount: 1})
		require.NoError(s, err)
	}
}

// start starts a River client with a worker, and returns what stops it.
func (s *setup) start(worker river.Worker[feedjobs.Args], periodic ...*river.PeriodicJob) (queue *river.Client[pgx.Tx], stop func()) {
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	queue, err := river.NewClient(riverpgxv5.New(s.pool), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}}, Workers: workers,
		Logger: slog.New(slog.DiscardHandler), PeriodicJobs: periodic, FetchPollInterval: 20 * time.Millisecond, FetchCooldown: 10 * time.Millisecond, TestOnly: true,
	})
	require.NoError(s, err)
	require.NoError(s, queue.Start(s.Context()))
	return queue, func() { require.NoError(s, queue.StopAndCancel(context.WithoutCancel(s.Context()))) }
}

// ended waits until a consumer has a job in a state, and returns the first.
func (s *setup) ended(queue *river.Client[pgx.Tx], consumer string, state rivertype.JobState) (found *rivertype.JobRow) {
	pgtest.WaitFor(s, "a job of "+consumer+" to be "+string(state), func() bool {
		all, err := queue.JobList(s.Context(), river.NewJobListParams().Kinds(feedjobs.Args{}.Kind()).States(state))
		require.NoError(s, err)
		for _, job := range all.Jobs {
			var args feedjobs.Args
			require.NoError(s, json.Unmarshal(job.EncodedArgs, &args))
			if args.Consumer == consumer && found == nil {
				found = job
			}
		}
		return found != nil
	})
	return found
}

// into is a consumer that sends the scopes of its entries.
func into(name string, scopes chan<- string, opts budget.FeedOptions) feedjobs.Consumer {
	return feedjobs.Consumer{Name: name, FeedOptions: opts, Do: func(ctx context.Context, _ pgx.Tx, entries []budget.FeedEntry) error {
		for _, e := range entries {
			select {
			case scopes <- e.Scope:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	}}
}

// The error of one consumer is that of its job, and keeps the page. The other's job says how far it is.
func TestPeriodicJobs_AreOneForEachConsumer(t *testing.T) {
	s := open(t)
	s.charge("a", "b", "c")
	_, err := s.ledger.NumberFeed(t.Context(), s.pool) // else the job that is slower to begin leaves it to the other one
	require.NoError(t, err)
	read := make(chan string, 10)
	good := into("good", read, budget.FeedOptions{Max: 2, Patience: time.Hour})
	bad := feedjobs.Consumer{Name: "bad", Do: func(context.Context, pgx.Tx, []budget.FeedEntry) error { return errors.New("the mail is down") }}
	queue, stop := s.start(feedjobs.NewWorker(s.pool, s.ledger, good, bad), feedjobs.PeriodicJobs(0, good, bad)...)
	defer stop()

	var lag budget.FeedConsumer
	require.NoError(t, json.Unmarshal(s.ended(queue, "good", rivertype.JobStateCompleted).Output(), &lag))
	require.Equal(t, "good", lag.Name)
	require.Equal(t, int64(3), lag.Consumed)
	require.Zero(t, lag.Unread)
	require.Equal(t, time.Hour, lag.Patience)
	require.Equal(t, []string{"a", "b", "c"}, []string{<-read, <-read, <-read})
	require.Contains(t, s.ended(queue, "bad", rivertype.JobStateDiscarded).Errors[0].Error, "the mail is down")
	all, err := s.ledger.FeedConsumers(t.Context(), s.pool)
	require.NoError(t, err)
	require.Len(t, all, 1, "nothing of bad's is consumed, not even its place")

	_, err = queue.Insert(t.Context(), feedjobs.Args{Consumer: "unknown"}, &river.InsertOpts{MaxAttempts: 1})
	require.NoError(t, err)
	require.Contains(t, s.ended(queue, "unknown", rivertype.JobStateDiscarded).Errors[0].Error, `no consumer "unknown"`)
}

// With Poll one job goes on, over its turns, and when River is stopped and started.
func TestWorker_FollowsTheFeed(t *testing.T) {
	s := open(t)
	read := make(chan string)
	follower := into("follower", read, budget.FeedOptions{Poll: time.Millisecond})
	worker := feedjobs.WithTurn(feedjobs.NewWorker(s.pool, s.ledger, follower), 20*time.Millisecond)
	queue, stop := s.start(worker, feedjobs.PeriodicJobs(time.Hour, follower)...)
	s.charge("a")
	require.Equal(t, "a", <-read)
	snoozes := func() int {
		return pgtest.Value[int](t, s.pool, "select coalesce(max((metadata->>'snoozes')::int), 0) from river_job")
	}
	pgtest.WaitFor(t, "two turns", func() bool { return snoozes() >= 2 })
	s.charge("b")
	require.Equal(t, "b", <-read)
	pgtest.WaitFor(t, "b to be consumed", func() bool { return pgtest.Value[int64](t, s.pool, "select max(consumed) from metered.feed_lag") == 2 })
	stop()
	require.Zero(t, pgtest.Value[int](t, s.pool, "select count(*)::int from river_job where state in ('running', 'discarded', 'completed', 'cancelled')"))

	s.charge("c")
	_, stop = s.start(worker)
	defer stop()
	require.Equal(t, "c", <-read)
	require.Equal(t, 1, pgtest.Value[int](t, s.pool, "select count(*)::int from river_job"), "no other job was needed")
	_, err := queue.JobCancel(t.Context(), pgtest.Value[int64](t, s.pool, "select id from river_job"))
	require.NoError(t, err)
	s.ended(queue, "follower", rivertype.JobStateCancelled)
}

// While a job of a consumer works, others end at once, and wait for nothing. Its lock ends with its connection, as after a kill.
func TestWorker_OneJobOfAConsumerWorks(t *testing.T) {
	s := open(t)
	s.charge("a")
	working, goOn := make(chan bool), make(chan bool)
	slow := feedjobs.Consumer{Name: "slow", Do: func(ctx context.Context, _ pgx.Tx, _ []budget.FeedEntry) error {
		select {
		case working <- true:
			<-goOn
		case <-ctx.Done():
		}
		return ctx.Err()
	}}
	queue, stop := s.start(feedjobs.NewWorker(s.pool, s.ledger, slow))
	defer stop()
	defer close(goOn)
	insert := func() int64 {
		job, err := queue.Insert(t.Context(), feedjobs.Args{Consumer: "slow"}, &river.InsertOpts{MaxAttempts: 1})
		require.NoError(t, err)
		return job.Job.ID
	}
	first := insert()
	<-working
	second := insert()
	require.Equal(t, second, s.ended(queue, "slow", rivertype.JobStateCompleted).ID)
	require.Equal(t, first, s.ended(queue, "slow", rivertype.JobStateRunning).ID)

	killed := pgtest.Value[bool](t, s.pool, "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and objsubid = 2 and database = (select oid from pg_database where datname = current_database())")
	require.True(t, killed)
	insert() // has the lock, and waits for the page
	pgtest.WaitFor(t, "the third job", func() bool {
		return pgtest.Value[bool](t, s.pool, "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%consume_feed%')")
	})
	goOn <- true
	pgtest.WaitFor(t, "all jobs to end", func() bool {
		return pgtest.Value[int](t, s.pool, "select count(*)::int from river_job where state in ('completed', 'discarded')") == 3
	})
	all, err := s.ledger.FeedConsumers(t.Context(), s.pool)
	require.NoError(t, err)
	require.Equal(t, int64(1), all[0].Consumed)
}

package maintainjobs_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/maintain"
	"github.com/pgmetered/metered/maintain/maintainjobs"
)

const day = 24 * time.Hour

// start starts a River client with periodic jobs.
func start(t *testing.T, pool *pgxpool.Pool, parts maintain.Parts, policy maintain.Policy, periodic ...*river.PeriodicJob) *river.Client[pgx.Tx] {
	t.Helper()
	workers := river.NewWorkers()
	river.AddWorker(workers, maintainjobs.NewWorker(pool, parts, policy))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2}}, Workers: workers,
		Logger: slog.New(slog.DiscardHandler), PeriodicJobs: periodic, TestOnly: true,
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond, PollOnly: true,
	})
	require.NoError(t, err)
	require.NoError(t, client.Start(t.Context()))
	return client
}

func TestPeriodicJobs_SweepAndPurge(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, time.Now())
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := book.Place(t.Context(), tx, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		for range 60 {
			if err == nil {
				_, err = ledger.Charge(t.Context(), tx, budget.Charge{Scope: "org", Amount: 1})
			}
		}
		return err
	}))
	clock.Advance(day)
	client := start(t, pool, maintain.Parts{Ledger: ledger, Holds: book}, maintain.Policy{Entries: time.Hour}, maintainjobs.PeriodicJobs(0, 0)...)
	defer func() { require.NoError(t, client.StopAndCancel(context.WithoutCancel(t.Context()))) }()
	reports := map[bool]maintain.Report{}
	pgtest.WaitFor(t, "both jobs to be completed", func() bool {
		jobs, err := client.JobList(t.Context(), river.NewJobListParams().Kinds(maintainjobs.Args{}.Kind()).States(rivertype.JobStateCompleted))
		require.NoError(t, err)
		for _, j := range jobs.Jobs {
			var args maintainjobs.Args
			var report maintain.Report
			require.NoError(t, json.Unmarshal(j.EncodedArgs, &args))
			require.NoError(t, json.Unmarshal(j.Output(), &report))
			reports[args.Purge] = report
		}
		return len(reports) == 2
	})
	for _, s := range reports[false].Steps {
		if s.Name == "sweep holds" {
			require.EqualValues(t, 1, s.Done)
		} else if s.Name == "purge entries" {
			require.Equal(t, "Policy.NoPurges", s.Off)
		}
	}
	for _, s := range reports[true].Steps {
		if s.Name == "purge entries" {
			require.Positive(t, s.Done)
		} else if s.Name == "sweep holds" {
			require.Equal(t, "Policy.NoSweeps", s.Off)
		}
	}
}

// A purge that River stops is not lost: the job runs again, and goes on after the scope that it came to.
func TestWorker_GoesOnWhereItWasStopped(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, time.Now())
	ledger, err := budget.New(budget.Config{LockTimeout: time.Hour})
	require.NoError(t, err)
	for _, scope := range []string{"a", "b", "c"} {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 1})
			return err
		}))
	}
	clock.Advance(day)
	release := pgtest.LockScope(t, pool, pgtest.NewClient(t, pool, metered.Config{}), "c")
	parts, at := maintain.Parts{Ledger: ledger}, make(chan string, 100)
	policy := maintain.Policy{Entries: time.Hour, Progress: func(r maintain.Report) {
		if r.After != "" {
			at <- r.After
		}
	}}
	client := start(t, pool, parts, policy, maintainjobs.PeriodicJobs(-1, 0)...)
	require.Equal(t, "a", <-at)
	require.Equal(t, "b", <-at)
	require.NoError(t, client.StopAndCancel(context.WithoutCancel(t.Context()))) // while it waits for c
	release()
	var output []byte
	require.NoError(t, pool.QueryRow(t.Context(), `select metadata->'output' from river_job where args->>'purge' = 'true'`).Scan(&output))
	var report maintain.Report
	require.NoError(t, json.Unmarshal(output, &report))
	require.Equal(t, "b", report.After)

	// No further job is enqueued: it would begin at the first scope.
	_, err = pool.Exec(t.Context(), `update river_job set scheduled_at = now(), state = 'available' where args->>'purge' = 'true'`)
	require.NoError(t, err)
	client = start(t, pool, parts, policy)
	defer func() { require.NoError(t, client.StopAndCancel(context.WithoutCancel(t.Context()))) }()
	require.Equal(t, "c", <-at)
}

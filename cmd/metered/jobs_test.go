package main

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestJobs_ListsTheLongestLinesFirst(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	l := as(t, pool, metered.GrantReportingSQL)
	require.Contains(t, l.ok("jobs"), "No jobs are parked.")
	for i, scope := range []string{"long", "long", "long", "short", "short"} {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: metered.NewID(), Input: i}, func(ctx context.Context, tx *metered.Tx) (jobs.Result, error) {
			return tx.Enqueue(ctx, pgtest.Process{Name: scope}, &jobs.Options{Hold: &jobs.Units{
				TTL: time.Hour, Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}},
			}})
		})
		require.NoError(t, err)
	}
	_, err := c.Jobs.Release(t.Context(), pool)
	require.NoError(t, err)
	all := l.objects("jobs")
	require.Equal(t, []any{"long", "short"}, values(all, "scope"))
	require.Equal(t, []any{2.0, 1.0}, values(all, "waiting"))
	require.Equal(t, []any{false, false}, values(all, "due"))
	require.NotNil(t, all[0]["looked_at"], "a hold falls due then")
	require.Equal(t, []any{"long"}, values(l.objects("jobs", "-n", "1"), "scope"))
	require.Equal(t, []any{0.0, 0.0}, values(all, "per_hour"))
	oldest, err := time.Parse(time.RFC3339, all[0]["oldest"].(string))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), oldest, time.Hour)
	text := l.ok("jobs")
	require.Contains(t, text, "WAITING")
	require.Contains(t, text, "short")
	_, err = pool.Exec(t.Context(), "update metered.parked_scopes set wake_at = '-infinity', trouble = 'no such zone' where scope = 'long'")
	require.NoError(t, err)
	text = l.ok("jobs")
	require.Contains(t, text, "now")
	require.Contains(t, text, "no such zone")
	l.exits(exitUsage, "jobs", "-n", "0")
	l.exits(exitUsage, "jobs", "long", "short")

	waiting := l.objects("jobs", "long")
	require.Equal(t, []any{1.0, 2.0}, values(waiting, "position"))
	require.Equal(t, []any{"process", "process"}, values(waiting, "kind"))
	require.Equal(t, []any{1.0, 1.0}, values(waiting, "amount"))
	require.Len(t, l.objects("jobs", "long", "-n", "1"), 1)
	text = l.ok("jobs", "long")
	require.Contains(t, text, "POSITION")
	require.Contains(t, text, "default")
	require.Contains(t, l.ok("jobs", "none"), "No jobs are parked there.")
}

func TestOperation_SaysThatItsJobIsParkedAndThenRivers(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	l := cli(t, pgtest.AsRole(t, pool, metered.GrantReportingSQL, "grant select on river_job to $role"))
	var last int64
	for i := range 3 {
		outcome, err := metered.Do(t.Context(), c, metered.Command{ID: fmt.Sprint("op", i), Name: "order", Input: i}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
			r, err := tx.Enqueue(ctx, pgtest.Process{Name: "a"}, &jobs.Options{Hold: &jobs.Units{
				Lines: []holds.Line{{Scope: "gpu", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}},
			}})
			return r.JobID, err
		})
		require.NoError(t, err)
		last = outcome.Result
	}
	job := func(id string) map[string]any {
		return l.objects("operation", id)[0]["jobs"].(map[string]any)["jobs"].([]any)[0].(map[string]any)
	}
	require.Equal(t, "available", job("op0")["state"])
	require.Equal(t, map[string]any{
		"id": float64(last), "state": "parked", "waits_for": "gpu", "position": 2.0, "kind": "process", "queue": "default", "attempt": 0.0, "priority": 1.0,
		"created": job("op2")["created"],
	}, job("op2"))
	require.Contains(t, l.ok("operation", "op2"), "parked, number 2 in the line of gpu")
	explained := l.object("jobs", "--job", fmt.Sprint(last))
	require.Equal(t, []any{"gpu", 2.0, 2.0, nil}, []any{explained["scope"], explained["position"], explained["waiting"], explained["args"]})
	text := l.ok("jobs", "--job", fmt.Sprint(last))
	require.Contains(t, text, "1 of gpu, number 2 of 2")
	require.Contains(t, text, `"gpu" has a limit of 1 in all: 0 used, 1 held, 1 wanted: when units are freed`)
	l.exits(exitUnknown, "jobs", "--job", "1000000")
	l.exits(exitUsage, "jobs", "gpu", "--job", "1")
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Jobs.CancelParked(t.Context(), tx, last)
		return err
	}))
	require.Equal(t, true, job("op2")["gone"])
	require.Contains(t, l.ok("operation", "op2"), "gone")

	execute(t, pool, "update river_job set state = 'completed', finalized_at = now()")
	report, err := c.Jobs.Release(t.Context(), pool)
	require.NoError(t, err)
	require.EqualValues(t, 1, report.Released)
	require.Equal(t, "available", job("op1")["state"])
	require.Contains(t, l.ok("operation", "op1"), "available")
}

// A parked job whose id River has given to another is listed with its reason, and explained.
func TestJobs_ListsJobsInTrouble(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	l := cli(t, pgtest.AsRole(t, pool, metered.GrantReportingSQL, "grant select on river_job to $role"))
	enqueue := func(opts *jobs.Options) (job jobs.Result) {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
			job, err = c.Jobs.Enqueue(t.Context(), tx, pgtest.Process{Name: "a"}, opts)
			return err
		}))
		return job
	}
	gpu := &jobs.Options{Tenant: "acme", Hold: &jobs.Units{Lines: []holds.Line{{Scope: "gpu", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}}
	enqueue(gpu)
	parked := enqueue(gpu)
	execute(t, pool, "truncate river_job restart identity")
	enqueue(nil)
	require.Equal(t, parked.JobID, enqueue(nil).JobID)
	report, err := c.Jobs.Release(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{Ended: 1, Troubled: 1}, report)
	listed := l.object("jobs")
	require.Equal(t, []any{float64(parked.JobID), "acme"}, []any{listed["job_id"], listed["tenant"]})
	require.Contains(t, listed["trouble"], "River has another job of the id")
	require.NotEmpty(t, listed["tried_at"])
	text := l.ok("jobs")
	require.Contains(t, text, "in trouble. All others go on")
	require.NotContains(t, text, "No jobs are parked.")
	explained := l.ok("jobs", "--job", fmt.Sprint(parked.JobID))
	require.Contains(t, explained, "its next try")
	require.Contains(t, explained, "River has another job of the id")

	// Ids that are drawn from now on are above those of parked jobs, as docs/operations.md has it.
	next := enqueue(gpu)
	require.False(t, next.Parked)
	waits := enqueue(gpu)
	execute(t, pool, "truncate river_job restart identity")
	execute(t, pool, "select setval('river_job_id_seq', greatest((select last_value from river_job_id_seq), (select max(job_id) from metered.parked_jobs)))")
	require.Equal(t, waits.JobID+1, enqueue(nil).JobID)
}

// A job that River has as pending between two attempts, and that stands in no line, is found by a role that may read River's table.
func TestJobs_ListsJobsInNoLine(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	l := cli(t, pgtest.AsRole(t, pool, metered.GrantReportingSQL, "grant select on river_job to $role"))
	var job jobs.Result
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		job, err = c.Jobs.Enqueue(t.Context(), tx, pgtest.Process{Name: "a"}, &jobs.Options{Tenant: "acme", GiveBack: true, Hold: &jobs.Units{
			Lines: []holds.Line{{Scope: "gpu", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}},
		}})
		return err
	}))
	execute(t, pool, "update river_job set state = 'retryable', scheduled_at = now() + interval '1 hour', attempt = 1")
	_, err := c.Jobs.Release(t.Context(), pool)
	require.NoError(t, err)
	require.Empty(t, l.objects("jobs"))
	l.ok("verify")
	execute(t, pool, "delete from metered.parked_jobs")
	require.Equal(t, []any{float64(job.JobID)}, values(l.objects("jobs"), "id"))
	require.Contains(t, l.ok("jobs"), "in no line")
	require.Contains(t, l.exits(exitDifferences, "verify").out, fmt.Sprintf("line of job %d", job.JobID))
	_, err = c.Jobs.Release(t.Context(), pool)
	require.NoError(t, err)
	l.ok("verify")
	require.Empty(t, l.objects("jobs"))

	none := as(t, pool, metered.GrantReportingSQL) // may not read River's table
	require.Contains(t, none.ok("jobs"), "No jobs are parked.")
}

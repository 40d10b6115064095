package main

import (
	"context"
	"testing"
	"time"

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
			return tx.Enqueue(ctx, pgtest.Process{Name: scope}, &jobs.Options{Hold: &holds.Request{
				TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}},
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
	text := l.ok("jobs")
	require.Contains(t, text, "WAITING")
	require.Contains(t, text, "short")
	_, err = pool.Exec(t.Context(), "update metered.parked_scopes set wake_at = '-infinity', trouble = 'no such zone' where scope = 'long'")
	require.NoError(t, err)
	text = l.ok("jobs")
	require.Contains(t, text, "now")
	require.Contains(t, text, "no such zone")
	l.exits(exitUsage, "jobs", "-n", "0")
}

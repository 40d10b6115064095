package console_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// Jobs that wait for budget are on the overview by scope, on the page of the scope in their order, and on that of their operation.
func TestPages_ShowJobsThatWaitForBudget(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{RiverUI: "https://river.example"}, "grant select on river_job to $role")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(9))
	require.NotContains(t, text(w.see("")), "Jobs that wait")
	for i, scope := range []string{"gpu <b>", "gpu <b>", "gpu <b>", "rate", "rate"} {
		request := &jobs.Units{Charges: []budget.Charge{{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.PerWindow(1, time.Hour)}}}}
		if i < 3 {
			request = &jobs.Units{Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}
		}
		_, err := metered.Do(t.Context(), w.client, metered.Command{ID: fmt.Sprint("op", i), Input: i}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			return tx.Enqueue(ctx, process{Name: "a"}, &jobs.Options{Tenant: "acme", Hold: request, MaxWait: 24 * time.Hour})
		})
		require.NoError(t, err)
		clock.Advance(time.Minute)
	}
	line := text(byID(t, w.see(""), "parked"))
	require.Regexp(t, `gpu <b> 2 \S+ 09:01:00 0 when units are freed`, line)
	require.Regexp(t, `rate 1 \S+ 09:04:00 0 \S+ 10:03:00`, line)
	waiting := text(byID(t, w.see("scope", "scope", "gpu <b>"), "parked"))
	require.Regexp(t, `1 \d+ process default – acme 1 1 \S+ 09:01:00 \S+ 09:01:00 2 \d+ process default – acme 1 1 \S+ 09:02:00 `, waiting)
	href, _ := attr(all(byID(t, w.see("scope", "scope", "gpu <b>"), "parked"), "a")[0], "href")
	second := strings.TrimPrefix(href, "job?id=")
	job := w.see("job", "id", second)
	require.Regexp(t, `Kind process .*Tenant acme .*Waits for 1 of gpu <b> Place in line 1 of 2 `, text(byID(t, job, "main")))
	require.Contains(t, text(byID(t, job, "kept")), "gpu <b>")
	for _, id := range []string{"", "x", "999999"} {
		response, body := w.get(w.url("job", "id", id))
		require.Equal(t, http.StatusNotFound, response.StatusCode)
		require.Contains(t, text(parse(t, body)), "No such job waits for budget")
	}
	operation := w.see("operation", "id", "op2")
	require.Contains(t, text(operation), "process parked number 2 in the line of gpu <b> default 0 –")
	for _, a := range all(byID(t, operation, "main"), "a") {
		href, _ := attr(a, "href")
		require.NotContains(t, href, "river.example", "River has no page of it")
	}

	clock.Advance(time.Hour)
	report, err := w.client.Jobs.Release(t.Context(), w.pool)
	require.NoError(t, err)
	require.EqualValues(t, 1, report.Released)
	require.NotContains(t, text(byID(t, w.see(""), "parked")), "rate")
	require.Contains(t, text(w.see("operation", "id", "op4")), "process available default")
}

// A parked job that River's table refuses is on the overview, with the reason.
func TestPages_ShowJobsInTrouble(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "grant select on river_job to $role")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(9))
	require.NotContains(t, text(w.see("")), "Jobs in trouble")
	for i := range 2 {
		_, err := metered.Do(t.Context(), w.client, metered.Command{ID: fmt.Sprint("op", i), Input: i}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			return tx.Enqueue(ctx, process{Name: "a"}, &jobs.Options{Tenant: "acme", Hold: &jobs.Units{
				Charges: []budget.Charge{{Scope: "rate", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1, time.Hour)}}},
			}})
		})
		require.NoError(t, err)
	}
	pgtest.Execute(t, w.pool, "alter table river_job add constraint never check (id < 0) not valid")
	clock.Advance(time.Hour)
	report, err := w.client.Jobs.Release(t.Context(), w.pool)
	require.NoError(t, err)
	require.EqualValues(t, 1, report.Troubled)
	require.Regexp(t, `\d+ process default – acme \S+ 10:00:00 \S+ 10:00:10 new row for relation "river_job" violates check constraint "never" \(SQLSTATE 23514\)`,
		text(byID(t, w.see(""), "troubled")))
}

package jobs_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
)

// The privileges that River's insert needs, and no more.
const riverGrantSQL = `
grant select, insert, update on river_job to $role;
grant usage on sequence river_job_id_seq to $role`

// as returns a fixture that connects as a new role with these grants, and River's.
func (f *fixture) as(grants func(schema, role string) (string, error)) *fixture {
	f.t.Helper()
	pool := pgtest.AsRole(f.t, f.pool, grants, riverGrantSQL)
	return on(f.t, pool, jobs.Config{}, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
}

func requireForbidden(t *testing.T, err error, what string) {
	t.Helper()
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), what)
}

func TestRoles_ApplicationNeedsOnlyItsGrants(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := open(t)
	app := f.as(metered.GrantSQL)

	first := app.mustEnqueue(process{"a"}, key("k"))
	require.Equal(t, jobs.Result{JobID: first.JobID}, app.mustEnqueue(process{"a"}, key("k")))
	require.True(t, app.mustEnqueue(process{"a"}, nil).Created)
	_, err := app.Find(app.ctx, app.pool, "", "k")
	require.NoError(t, err)

	for _, forbidden := range []string{
		"insert into metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest) values (1, now(), 'q', 'k', 'k', '', '')",
		"update metered.job_keys set job_id = 1",
		"delete from metered.job_keys",
		"truncate metered.job_keys",
	} {
		_, err = app.pool.Exec(f.ctx, forbidden)
		requireForbidden(t, err, forbidden)
	}
	_, err = purge.JobKeys.Delete(app.ctx, app.pool, purge.Options{OlderThan: time.Hour})
	requireForbidden(t, err, "purge")
	f.requireCounts(2, 1)
}

func TestRoles_MaintenanceMayPurgeButNotClaim(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := open(t)
	clock := pgtest.SetClock(t, f.pool, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	f.mustEnqueue(process{"a"}, key("k"))
	clock.Advance(2 * time.Hour)
	maintenance := f.as(metered.GrantMaintenanceSQL)
	_, err := maintenance.enqueue(process{"b"}, key("other"))
	requireForbidden(t, err, "claim")
	deleted, err := purge.JobKeys.Delete(f.ctx, maintenance.pool, purge.Options{OlderThan: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted)
	f.requireCounts(1, 0)
}

func TestRoles_ApplicationParksAndReleasesAndOthersDoNot(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	role := func(grants func(schema, role string) (string, error)) *gated {
		pool := pgtest.AsRole(t, g.pool, grants, riverGrantSQL)
		return &gated{fixture: on(t, pool, jobs.Config{Holds: g.book}, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}}), ledger: g.ledger, book: g.book}
	}
	app := role(pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL))
	first := app.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	parked := []jobs.Result{app.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1))), app.mustEnqueue(process{"c"}, needs(slots("gpu", 1, 1)))}
	require.True(t, parked[0].Parked && parked[1].Parked)
	_, err := app.pool.Exec(g.ctx, "update river_job set state = 'cancelled', finalized_at = now() where id = $1", first.JobID)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{Ended: 1, Released: 1}, app.release())
	app.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := app.Reprioritize(g.ctx, tx, parked[1].JobID, 2); return err })
	_, err = app.Explain(g.ctx, app.pool, parked[1].JobID)
	require.NoError(t, err)
	o := needs(slots("own", 1, 1))
	o.GiveBack, o.Burst = true, needs(slots("pool", 1, 1)).Hold
	again := app.mustEnqueue(process{"e"}, o)
	app.fails(again.JobID, 3600)
	require.Equal(t, jobs.ReleaseReport{Ended: 1}, app.release())
	app.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := app.CancelParked(g.ctx, tx, again.JobID); return err })
	require.Equal(t, rivertype.JobStateCancelled, app.job(again.JobID).State)

	for _, forbidden := range []string{
		"insert into metered.parked_scopes (key, wake_at, waiting, scope) values (1, now(), 1, 's')",
		"update metered.parked_jobs set amount = 1",
		"update metered.parked_scopes set waiting = 0",
		"delete from metered.parked_jobs",
		"truncate metered.parked_scopes",
		"select metered._start_job(null, null, null, 1, null, null)",
		"select metered._leave_line(1)",
		"select metered._mark_freed('s')",
	} {
		_, err = app.pool.Exec(g.ctx, forbidden)
		requireForbidden(t, err, forbidden)
	}
	reporting, maintenance, alone := role(metered.GrantReportingSQL), role(metered.GrantMaintenanceSQL), role(metered.GrantSQL)
	_, err = reporting.Explain(g.ctx, reporting.pool, parked[1].JobID)
	require.NoError(t, err)
	_, err = alone.Explain(g.ctx, alone.pool, parked[1].JobID)
	require.NoError(t, err)
	require.True(t, alone.mustEnqueue(process{"x"}, key("k")).Created, "without a hold it needs River's grants alone")
	for name, other := range map[string]*gated{"reporting": reporting, "maintenance": maintenance, "application": alone} {
		_, err = other.enqueue(process{"d"}, needs(slots("gpu", 1, 1)))
		requireForbidden(t, err, name)
		_, err = other.Release(g.ctx, other.pool)
		requireForbidden(t, err, name)
		err = pgx.BeginFunc(g.ctx, other.pool, func(tx pgx.Tx) error {
			_, err := other.CancelParked(g.ctx, tx, parked[1].JobID)
			return err
		})
		requireForbidden(t, err, name)
	}
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// A role that may charge and hold, and has no right on River's tables, can have the releaser insert no job, and can take none away: no function
// that it may call writes a parked job, whatever it is called.
func TestRoles_ParkingIsAPrivilegeOfItsOwn(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	require.True(t, g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1))).Parked)
	thief := pgtest.AsRole(t, g.pool, metered.GrantSQL, "")
	job := `[{"job_id": 5, "kind": "k", "queue": "q", "args": {}, "metadata": {"metered:hold": "job/5/0123456789abcdef"}, "tags": [], "priority": 1, "max_attempts": 1,
		"hold": "(,,,,,,,,,,,,)", "charges": "{\"(s,1,1,1,{},,,,)\"}", "rest_us": 0}]`
	for _, call := range []string{
		"metered.park_jobs('" + job + "', interval '1 minute', 1000, null, null, false)",
		"metered.rest_jobs('" + job + "')",
		"metered.release_jobs(null, null, 1000, 1, interval '1 minute', null, null)",
		"metered.judged_scopes(null, 1000, 1)",
		"metered.trouble_jobs('{2}', '{no}')",
		"metered.drop_parked(1)",
		"metered.change_parked(2, null, 1000)",
	} {
		_, err := thief.Exec(g.ctx, "select "+call)
		requireForbidden(t, err, call)
	}
	writers := pgtest.Value[[]string](t, g.pool, `select coalesce(array_agg(p.proname::text), '{}') from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and p.proname not like '\_%' and has_function_privilege($1, p.oid, 'execute')
		and p.prosrc ~ 'parked_jobs' and p.provolatile = 'v'`, pgtest.Value[string](t, thief, "select current_user::text"))
	require.Empty(t, writers)
}

// The functions refuse what the Enqueuer does not send, above all what SQL casts and Go does not: such a job would stop those of all.
func TestRoles_ParkJobsRefusesWrongArguments(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	app := pgtest.AsRole(t, g.pool, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), riverGrantSQL)
	job := func(changed string) string {
		return `[{"job_id": 5, "kind": "k", "queue": "q", "args": {}, "metadata": {"metered:hold": "job/5/0123456789abcdef"}, "tags": [], "priority": 1, "max_attempts": 1,
			"hold": "(,,,,,,,,,,,,)", "charges": "{}"` + changed + `}]`
	}
	for _, parking := range []string{
		"[]", "{}", "null", "[1]", `[{}]`,
		job(`, "job_id": 6`), job(`, "priority": 5`), job(`, "max_attempts": 0`), job(`, "queue": ""`), job(`, "tags": {}`), job(`, "metadata": {}`),
		job(`, "metadata": {"metered:hold": "h"}`),
		job(`, "kind": 5`), job(`, "queue": 5`), job(`, "priority": "1"`), job(`, "max_attempts": "3"`), job(`, "job_id": "5"`), job(`, "tags": [1]`),
		job(`, "tags": [["abc"]]`), job(`, "tags": "abc"`), job(`, "kind": null`), job(`, "most": 0`), job(`, "wait_us": 0`), job(``), // without charges
	} {
		_, err := app.Exec(g.ctx, "select metered.park_jobs($1::jsonb, interval '1 minute', 1000, null, null, false)", parking)
		require.Equal(t, "22023", sqlstate.Of(err), "%s: %v", parking, err)
		require.Equal(t, parking == job(``), strings.Contains(err.Error(), "charges"), "%s: %v", parking, err)
	}
	for _, call := range []string{
		"metered.release_jobs(null, null, 1000, 0, interval '1 minute', null, null)",
		"metered.release_jobs(null, null, 1000, 1001, interval '1 minute', null, null)",
		"metered.judged_scopes(null, 1000, 0)",
		"metered.drop_parked(0)",
		"metered.change_parked(1, 5, 1000)",
		"metered.change_parked(1, 0, 1000)",
	} {
		_, err := app.Exec(g.ctx, "select "+call)
		require.Equal(t, "22023", sqlstate.Of(err), "%s: %v", call, err)
	}
}

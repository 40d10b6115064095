package jobs_test

import (
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
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
	_, err = app.Purge(app.ctx, app.pool, jobs.PurgeOptions{OlderThan: time.Hour})
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
	deleted, err := maintenance.Purge(f.ctx, maintenance.pool, jobs.PurgeOptions{OlderThan: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted)
	f.requireCounts(1, 0)
}

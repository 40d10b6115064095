package jobs_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
)

// What River's insert needs, and no more.
const riverGrantSQL = `
grant select, insert, update on river_job to $role;
grant usage on sequence river_job_id_seq to $role`

func TestRoles_ApplicationNeedsOnlyItsGrants(t *testing.T) {
	t.Parallel()
	f := open(t)
	var role string
	require.NoError(t, f.pool.QueryRow(f.ctx, "select 'job_app_' || md5(random()::text)").Scan(&role))
	_, err := f.pool.Exec(f.ctx, "create role "+role)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := f.pool.Exec(context.Background(), "drop owned by "+role)
		require.NoError(t, err)
		_, err = f.pool.Exec(context.Background(), "drop role "+role)
		require.NoError(t, err)
	})
	grants, err := metered.GrantSQL("metered", role)
	require.NoError(t, err)
	_, err = f.pool.Exec(f.ctx, grants+strings.ReplaceAll(riverGrantSQL, "$role", role))
	require.NoError(t, err)

	config := f.pool.Config().Copy()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "set role "+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(f.ctx, config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	app := on(t, pool, jobs.Config{}, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})

	first := app.mustEnqueue(process{"a"}, key("k"))
	require.Equal(t, jobs.Result{JobID: first.JobID}, app.mustEnqueue(process{"a"}, key("k")))
	require.True(t, app.mustEnqueue(process{"a"}, nil).Created)
	_, err = app.Find(app.ctx, app.pool, "", "k")
	require.NoError(t, err)

	for _, forbidden := range []string{
		"insert into metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest) values (1, now(), 'q', 'k', 'k', '', '')",
		"update metered.job_keys set job_id = 1",
		"delete from metered.job_keys",
		"truncate metered.job_keys",
	} {
		_, err = pool.Exec(f.ctx, forbidden)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), forbidden)
	}
	f.requireCounts(2, 1)
}

func TestRoles_PurgeIsForMaintenance(t *testing.T) {
	t.Parallel()
	f := open(t)
	const publicSQL = `select has_function_privilege('public', 'metered.purge_job_keys(timestamptz, timestamptz, int)', 'execute')`
	var everybody bool
	require.NoError(t, f.pool.QueryRow(f.ctx, publicSQL).Scan(&everybody))
	require.False(t, everybody)
	_, err := f.Purge(f.ctx, f.pool, jobs.PurgeOptions{OlderThan: time.Hour})
	require.NoError(t, err)
}

package pgtest

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgserver"
)

// A server as several test binaries share it through DATABASE_URL: each cluster value stands for one of them.
func sharedServer(t *testing.T) *pgserver.Server {
	t.Helper()
	server, err := pgserver.Start(t.Context(), pgserver.Options{Private: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	return server
}

func join(t *testing.T, server *pgserver.Server) *cluster {
	t.Helper()
	c, err := newCluster(t.Context(), server)
	require.NoError(t, err)
	t.Cleanup(func() { c.end(t) })
	return c
}

// end closes the sessions, as the end of the process does.
func (c *cluster) end(t *testing.T) {
	c.admin.Close()
	require.NoError(t, c.session.Close(context.Background()))
}

func databases(t *testing.T, server *pgserver.Server) []string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server.ConnString())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), `select datname::text from pg_database where datname like 'metered\_%' order by 1`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

func TestCluster_ProcessesAtOnceMakeOneTemplate(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	var wg sync.WaitGroup
	clusters, errs := make([]*cluster, 6), make([]error, 6)
	names := make([]string, 6)
	for i := range clusters {
		wg.Go(func() {
			if clusters[i], errs[i] = newCluster(t.Context(), server); errs[i] == nil {
				names[i], errs[i] = clusters[i].createDatabase(t.Context(), false)
			}
		})
	}
	wg.Wait()
	for i, c := range clusters {
		require.NoError(t, errs[i])
		defer c.end(t)
	}
	require.ElementsMatch(t, append(names, clusters[0].template), databases(t, server))
}

func TestCluster_DropsDatabasesOfEndedProcesses(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	killed, alive := join(t, server), join(t, server)
	_, err := killed.createDatabase(t.Context(), false)
	require.NoError(t, err)
	inUse, err := alive.createDatabase(t.Context(), true)
	require.NoError(t, err)

	// Templates of other schemas, used and not, one of them given up half way, and a database that is none of ours.
	usedTemplate := templatePrefix + "0123456789abcdef"
	_, err = alive.session.Exec(t.Context(), "select pg_advisory_lock_shared($1)", lockKey(usedTemplate))
	require.NoError(t, err)
	for _, name := range []string{usedTemplate, templatePrefix + "1", templatePrefix + "2" + makingSuffix, "metered_production"} {
		require.NoError(t, alive.exec(t.Context(), "create database %s", name))
	}
	killed.end(t)

	third := join(t, server)
	require.ElementsMatch(t, []string{third.template, inUse, usedTemplate, "metered_production"}, databases(t, server))
	require.NoError(t, alive.dropDatabase(t.Context(), inUse))
}

func TestCluster_AHalfMadeTemplateIsMadeAgain(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	first := join(t, server)
	require.NoError(t, first.exec(t.Context(), "drop database %s", first.template))
	require.NoError(t, first.exec(t.Context(), "create database %s", first.template+makingSuffix))

	second := join(t, server)
	require.Equal(t, []string{second.template}, databases(t, server))
	name, err := second.createDatabase(t.Context(), false)
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), pgserver.WithDatabase(server.ConnString(), name))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var exists bool
	require.NoError(t, conn.QueryRow(t.Context(), "select to_regclass('metered.schema_version') is not null").Scan(&exists))
	require.True(t, exists)
}

// Postgres gives up after five seconds to drop a database whose sessions do not end, or to copy it.
func TestCluster_WaitsForSessionsThatEndSlowly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, err := shared()
	require.NoError(t, err)
	name, err := c.createDatabase(ctx, true)
	require.NoError(t, err)
	slow, err := pgx.Connect(ctx, pgserver.WithDatabase(c.server.ConnString(), name))
	require.NoError(t, err)
	done := Going(func() error { _, err := c.copyDatabase(ctx, name); return err })
	tries := map[time.Time]bool{}
	WaitFor(t, "the second try, or an error", func() bool {
		var began *time.Time
		require.NoError(t, c.admin.QueryRow(ctx, `select max(query_start) from pg_stat_activity
			where state = 'active' and query like 'create database %"' || $1 || '"%' and pid <> pg_backend_pid()`, name).Scan(&began))
		if began != nil {
			tries[*began] = true
		}
		return len(tries) > 1 || len(done) > 0
	})
	require.NoError(t, slow.Close(ctx))
	require.NoError(t, <-done)
}

func TestApplicationName(t *testing.T) {
	t.Parallel()
	require.Equal(t, "TestX/y", applicationName("TestX/y"))
	require.Equal(t, strings.Repeat("x", 61)+"/y", applicationName("Test"+strings.Repeat("x", 80)+"/y"))
	require.Equal(t, strings.Repeat("?", 40), applicationName(strings.Repeat("ü", 40)))
}

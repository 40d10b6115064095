package integration_test

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/jobs"
)

// citusCluster is started by the first test that needs it, and ends with the tests.
var citusCluster = sync.OnceValues(func() (*pgserver.Citus, error) {
	return pgserver.StartCitus(context.Background(), pgserver.Options{})
})

var (
	citusDatabases atomic.Int64
	citusMaking    sync.Mutex
)

// citus is a database of its own on a cluster. Its schema metered is a shard on one of the workers, and has River's tables and those of the caller, too.
type citus struct {
	t       *testing.T
	cluster *pgserver.Citus
	strings []string                 // of the nodes of cluster
	owner   *pgxpool.Pool            // of the coordinator
	nodes   map[string]*pgxpool.Pool // coordinator, home (the worker that has the schema) and other
	servers map[string]*pgserver.Server
}

// citusNodes are the names of the nodes.
var citusNodes = []string{"coordinator", "home", "other"}

// onCitus makes the database on the cluster. It skips the test where no binaries have the extension.
func onCitus(t *testing.T, start func() (*pgserver.Citus, error)) *citus {
	t.Helper()
	cluster, err := start()
	if errors.Is(err, pgserver.ErrNoCitus) {
		t.Skip(err)
	}
	require.NoError(t, err)
	citusMaking.Lock() // one at a time
	defer citusMaking.Unlock()
	name := fmt.Sprintf("citus_%d", citusDatabases.Add(1))
	strings, err := cluster.CreateDatabase(t.Context(), name)
	require.NoError(t, err)
	c := &citus{t: t, cluster: cluster, strings: strings}
	c.owner = c.open(0, "postgres")
	for _, setting := range []string{"citus.allow_nested_distributed_execution = on", "citus.enable_local_fast_path_query_optimization = off"} { // docs/scale.md
		pgtest.Execute(t, c.owner, "alter database "+name+" set "+setting)
	}
	c.owner.Reset()
	return c
}

// open returns a pool of one node, as a role that may log in.
func (c *citus) open(node int, role string) *pgxpool.Pool {
	c.t.Helper()
	config, err := pgxpool.ParseConfig(c.strings[node])
	require.NoError(c.t, err)
	config.MaxConns = 16
	config.ConnConfig.User = role
	config.ConnConfig.RuntimeParams["search_path"] = "metered"
	pool, err := pgxpool.NewWithConfig(c.t.Context(), config)
	require.NoError(c.t, err)
	c.t.Cleanup(pool.Close)
	return pool
}

// migrated makes the schema, and finds the node that has it.
func (c *citus) migrated() *citus {
	c.t.Helper()
	pgtest.Migrate(c.t, c.owner, metered.MigrateOptions{River: true, RiverSchema: "metered"})
	pgtest.Execute(c.t, c.owner, "create table metered.uploads (name text primary key)")
	c.nodes = c.as("postgres")
	return c
}

// as returns a pool of each node.
func (c *citus) as(role string) map[string]*pgxpool.Pool {
	c.t.Helper()
	home := pgtest.Value[string](c.t, c.owner, "select nodename from citus_shards where table_name = 'metered.ledger'::regclass")
	all := map[string]*pgxpool.Pool{}
	c.servers = map[string]*pgserver.Server{}
	for i, node := range c.cluster.At {
		name := "other"
		switch {
		case i == 0:
			name = "coordinator"
		case node.Host == home:
			name = "home"
		}
		all[name] = c.open(i, role)
		if len(c.cluster.Nodes) > 0 {
			c.servers[name] = c.cluster.Nodes[i]
		}
	}
	require.Len(c.t, all, 3)
	return all
}

// everyCall makes each public call through a node.
func (c *citus) everyCall(node string, pool *pgxpool.Pool, fails map[string]string) {
	c.t.Helper()
	fails = maps.Clone(fails)
	if fails["metered.Migrate, a new schema"] == "" {
		fails["metered.Migrate, a new schema"] = "not allowed on this node" // only the coordinator makes tables
	}
	if node == "coordinator" {
		delete(fails, "metered.Migrate, a new schema")
	}
	failed := everyCallBy(&behind{t: c.t, direct: c.owner, d: pgtest.NewClient(c.t, c.owner, metered.Config{}), pool: pool, c: pgtest.NewClient(c.t, pool, metered.Config{})}, 1)
	if err := failed["replica.ReadAt"]; err != nil { // positions of the log are of one server
		require.ErrorContains(c.t, err, "not one of this server")
		delete(failed, "replica.ReadAt")
	}
	for call, text := range fails {
		require.ErrorContains(c.t, failed[call], text, call)
		delete(failed, call)
	}
	require.Empty(c.t, failed)
}

// Each public call works through each node of a cluster.
func TestCitus_EveryCallThroughEachNode(t *testing.T) {
	t.Parallel()
	for _, node := range citusNodes {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			c := onCitus(t, citusCluster).migrated()
			c.everyCall(node, c.nodes[node], map[string]string{})
		})
	}
}

// … and, through the node that has the schema, as the role of an application, whose grants are those of GrantSQL and GrantJobsSQL.
func TestCitus_EveryCallOfAnApplication(t *testing.T) {
	t.Parallel()
	c := onCitus(t, citusCluster).migrated()
	role := fmt.Sprintf("app_%d", citusDatabases.Add(1))
	sql, err := pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL)("metered", role)
	require.NoError(t, err)
	sql = "create role " + role + " login;\n" + sql + strings.ReplaceAll(pgtest.RiverGrantSQL, "$role", role) + ";\n" +
		"grant select on metered.feed, metered.feed_state, metered.feed_consumers to " + role + ";\n" // docs/scale.md
	for _, statement := range schema.Statements(sql) {
		pgtest.Execute(t, c.owner, statement)
	}
	nodes := c.as(role)
	c.everyCall("home", nodes["home"], ways()["as the application"].fails)

	// Citus lets one role write in a transaction that goes to another node: the functions have written as the owner.
	_, err = metered.Do(t.Context(), pgtest.NewClient(t, nodes["other"], metered.Config{}), metered.Command{ID: "two roles"},
		func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Enqueue(ctx, process{"keyed"}, &jobs.Options{Key: "two roles"})
			return nil, err
		})
	require.ErrorContains(t, err, "25001")
	require.Zero(t, pgtest.Value[int](t, c.owner, "select count(*)::int from metered.job_keys where key = 'two roles'"))
}

// A schema of version 1 is upgraded on a cluster, with its rows.
func TestCitus_UpgradesTheReleasedSchema(t *testing.T) {
	t.Parallel()
	c := onCitus(t, citusCluster)
	file, err := os.Open("../internal/schema/testdata/0001.sql.gz")
	require.NoError(t, err)
	defer file.Close()
	text, err := gzip.NewReader(file)
	require.NoError(t, err)
	sql, err := io.ReadAll(text)
	require.NoError(t, err)
	tx, err := c.owner.Begin(t.Context())
	require.NoError(t, err)
	for _, statement := range schema.Statements(string(sql)) {
		_, err := tx.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}
	require.NoError(t, tx.Commit(t.Context()))
	c.migrated()
	report, err := metered.Validate(t.Context(), c.owner, "")
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	c.everyCall("other", c.nodes["other"], map[string]string{})
}

// Callers on all nodes charge one scope, which has a unit for each call. All get through, none gives up, and none waits while others get through a
// hundred times.
func TestCitus_NoCallerStarves(t *testing.T) {
	t.Parallel()
	const clients, each, limit = 4, 20, 3 * 4 * 20
	c := onCitus(t, citusCluster).migrated()
	charge := budget.Charge{Scope: "hot", Amount: 1, Limits: []budget.Limit{{Max: limit, Window: time.Hour}}}
	var through, gaveUp atomic.Int64
	var mu sync.Mutex
	overtaken, took := map[string]int64{}, map[string]time.Duration{} // the most of a call, and the time of all
	var wg sync.WaitGroup
	begin := time.Now()
	for node, pool := range c.nodes {
		client := pgtest.NewClient(t, pool, metered.Config{})
		for w := range clients {
			wg.Go(func() {
				for i := range each {
					before := through.Load()
					_, err := metered.Do[any](t.Context(), client, metered.Command{ID: fmt.Sprint(node, w, "-", i), Charges: []budget.Charge{charge}}, nil)
					if err != nil {
						t.Errorf("%s: %v", node, err)
						gaveUp.Add(1)
						continue
					}
					mu.Lock()
					overtaken[node] = max(overtaken[node], through.Add(1)-before-1)
					took[node] = max(took[node], time.Since(begin))
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	require.Zero(t, gaveUp.Load())
	for _, node := range citusNodes {
		t.Logf("%s: %d calls in %v, overtaken %d times at most", node, clients*each, took[node].Round(time.Millisecond), overtaken[node])
		require.Less(t, overtaken[node], int64(100), node)
	}
	_, err := metered.Do[any](t.Context(), pgtest.NewClient(t, c.nodes["other"], metered.Config{}), metered.Command{ID: "one more", Charges: []budget.Charge{charge}}, nil)
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.EqualValues(t, limit, pgtest.Value[int64](t, c.owner, "select spent from metered.ledger where scope = 'hot' order by seq desc limit 1"))
	pgtest.RequireVerified(t, c.owner, pgtest.NewClient(t, c.owner, metered.Config{}).Budget)
}

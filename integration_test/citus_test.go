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
	all := map[string]*pgxpool.Pool{"coordinator": c.open(0, role)}
	c.servers = map[string]*pgserver.Server{"coordinator": c.cluster.Nodes[0]}
	for i, node := range c.cluster.Nodes[1:] {
		name := "other"
		if node.Dir() == home {
			name = "home"
		}
		all[name], c.servers[name] = c.open(i+1, role), node
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

// … and, through the node that has the schema, as the role of an application, whose grants are GrantSQL's.
func TestCitus_EveryCallOfAnApplication(t *testing.T) {
	t.Parallel()
	c := onCitus(t, citusCluster).migrated()
	role := fmt.Sprintf("app_%d", citusDatabases.Add(1))
	sql, err := metered.GrantSQL("metered", role)
	require.NoError(t, err)
	sql = "create role " + role + " login;\n" + sql + strings.ReplaceAll(pgtest.RiverGrantSQL, "$role", role) + ";\n"
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

// Clients on all nodes charge one scope at once. Exactly its limit is let in, and nobody gives up.
func TestCitus_OneScopeChargedThroughAllNodes(t *testing.T) {
	t.Parallel()
	const clients, limit = 4, 300
	c := onCitus(t, citusCluster).migrated()
	charge := budget.Charge{Scope: "hot", Amount: 1, Limits: []budget.Limit{{Max: limit, Window: time.Hour}}}
	admitted := map[string]*atomic.Int64{}
	var wg sync.WaitGroup
	begin := time.Now()
	for node, pool := range c.nodes {
		count := &atomic.Int64{}
		admitted[node] = count
		client := pgtest.NewClient(t, pool, metered.Config{})
		for w := range clients {
			wg.Go(func() {
				for i := 0; ; i++ {
					_, err := metered.Do[any](t.Context(), client, metered.Command{ID: fmt.Sprint(node, w, "-", i), Charges: []budget.Charge{charge}}, nil)
					if errors.Is(err, budget.ErrExceeded) {
						return
					}
					if err != nil {
						t.Errorf("%s: %v", node, err)
						return
					}
					count.Add(1)
				}
			})
		}
	}
	wg.Wait()
	took := time.Since(begin)
	total := int64(0)
	for _, node := range citusNodes {
		n := admitted[node].Load()
		total += n
		t.Logf("%s: %d", node, n)
	}
	t.Logf("%.0f a second", float64(total)/took.Seconds())
	require.EqualValues(t, limit, total)
	require.EqualValues(t, limit, pgtest.Value[int64](t, c.owner, "select spent from metered.ledger where scope = 'hot' order by seq desc limit 1"))
	pgtest.RequireVerified(t, c.owner, pgtest.NewClient(t, c.owner, metered.Config{}).Budget)
}

// The worker that has the schema is killed with SIGKILL and started again, twice, while clients on all nodes send commands. Each answer is true.
func TestCitus_WorkerKilledAmidCommands(t *testing.T) {
	t.Parallel()
	const clients, each, kills = 3, 25, 2
	c := onCitus(t, func() (*pgserver.Citus, error) {
		cluster, err := pgserver.StartCitus(context.Background(), pgserver.Options{Durable: true, Settings: map[string]string{
			"fsync": "off", "citus.recover_2pc_interval": "1s", // the machine does not crash
		}})
		if err == nil {
			t.Cleanup(func() { require.NoError(t, cluster.Stop()) })
		}
		return cluster, err
	}).migrated()
	type answer struct {
		id  string
		err error
	}
	var mu sync.Mutex
	var answers []answer
	var ended atomic.Int64
	command := func(id string) metered.Command {
		return metered.Command{ID: id, Input: 1, Charges: []budget.Charge{{Scope: "killed", Amount: 1}, {Scope: "of " + id, Amount: 1}}}
	}
	all := map[string]*metered.Client{}
	var wg sync.WaitGroup
	for node, pool := range c.nodes {
		client := pgtest.NewClient(t, pool, metered.Config{LockTimeout: 2 * time.Second})
		all[node] = client
		for w := range clients {
			wg.Go(func() {
				for i := range each {
					id := fmt.Sprint(node, w, "-", i)
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					_, err := metered.Do[any](ctx, client, command(id), nil)
					cancel()
					mu.Lock()
					answers = append(answers, answer{id, err})
					mu.Unlock()
					ended.Add(1)
					if err != nil {
						time.Sleep(200 * time.Millisecond) // the server restarts: not all commands are to meet that
					}
				}
			})
		}
	}
	for n := range kills {
		for ended.Load() < int64((n+1)*3*clients*each/(kills+1)) && !t.Failed() {
			time.Sleep(time.Millisecond)
		}
		require.NoError(t, c.servers["home"].Kill())
		require.NoError(t, c.servers["home"].Restart(context.Background()))
	}
	wg.Wait()
	var committed, failed, unknown int
	count := func(id string) int {
		return pgtest.Value[int](t, c.owner, "select count(*)::int from metered.ledger where scope = 'of "+id+"'")
	}
	for _, pool := range c.nodes {
		pool.Reset()
	}
	for _, a := range answers {
		switch n := count(a.id); {
		case a.err == nil:
			committed++
			require.Equal(t, 1, n, "%s was acknowledged and is not there", a.id)
		case errors.Is(a.err, metered.ErrIndefinite):
			unknown++
			out, err := metered.Do[any](t.Context(), all["other"], command(a.id), nil)
			require.NoError(t, err, "%s after %v", a.id, a.err)
			require.Equal(t, n == 1, out.Replayed, "%s after %v", a.id, a.err)
		default:
			failed++
			require.Zero(t, n, "%s was not committed (%v) and is there", a.id, a.err)
		}
	}
	t.Logf("%d committed, %d failed, %d unknown and then committed", committed, failed, unknown)
	require.EqualValues(t, committed+unknown, pgtest.Value[int64](t, c.owner, "select spent from metered.ledger where scope = 'killed' order by seq desc limit 1"))
	require.NotZero(t, committed)
	require.NotZero(t, failed+unknown)
	pgtest.RequireVerified(t, c.owner, all["coordinator"].Budget)
}

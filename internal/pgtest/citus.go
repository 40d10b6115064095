package pgtest

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
)

// CitusEnv is the environment variable that has tests run on a cluster of Citus: through its
// "coordinator", or through "home", the worker that has the schema. River's tables are in the
// schema then.
const CitusEnv = "METERED_TEST_CITUS"

var citusDatabases atomic.Int64

var citus = sync.OnceValues(func() (*pgserver.Citus, error) {
	return pgserver.StartCitus(context.Background(), pgserver.Options{Settings: map[string]string{"deadlock_timeout": "100ms", "autovacuum": "off"}})
})

var makingOnCitus sync.Mutex // one database at a time

// citusDatabase makes a database of a cluster, with the schema or empty, and returns where the node
// is.
func citusDatabase(ctx context.Context, node string, empty bool) (connString string, drop func(context.Context) error, err error) {
	cluster, err := citus()
	if err != nil {
		return "", nil, err
	}
	makingOnCitus.Lock()
	defer makingOnCitus.Unlock()
	name := fmt.Sprint(testPrefix, "citus_", citusDatabases.Add(1))
	nodes, err := cluster.CreateDatabase(ctx, name)
	if err != nil {
		return "", nil, err
	}
	for _, setting := range []string{"citus.allow_nested_distributed_execution = on", "citus.enable_local_fast_path_query_optimization = off"} { // docs/scale.md
		if err := onNode(ctx, nodes[0], "alter database "+name+" set "+setting); err != nil {
			return "", nil, err
		}
	}
	drop = func(ctx context.Context) error {
		for _, n := range cluster.At {
			if err := onNode(ctx, n.ConnString, "drop database if exists "+name+" with (force)"); err != nil {
				return err
			}
		}
		return nil
	}
	if empty {
		return nodes[0], drop, nil
	}
	pool, err := pgxpool.New(ctx, nodes[0])
	if err != nil {
		return "", nil, err
	}
	defer pool.Close()
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true, RiverSchema: "metered"}); err != nil {
		return "", nil, err
	}
	at := 0
	if node != "coordinator" {
		var home string
		if err := pool.QueryRow(ctx, "select nodename from citus_shards where table_name = 'metered.ledger'::regclass").Scan(&home); err != nil {
			return "", nil, err
		}
		at = slices.IndexFunc(cluster.At, func(n pgserver.CitusNode) bool { return n.Host == home })
	}
	return nodes[at], drop, nil
}

func onNode(ctx context.Context, connString, sql string) error {
	conn, err := pgx.Connect(ctx, connString)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}

// connectEach connects to each node of Citus, such that what a connection changes is changed on
// that node alone, or to the one server.
func connectEach(ctx context.Context, to *pgx.ConnConfig) (conns []*pgx.Conn, err error) {
	conn, err := pgx.ConnectConfig(ctx, to)
	if err != nil || os.Getenv(CitusEnv) == "" {
		return []*pgx.Conn{conn}, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	rows, err := conn.Query(ctx, "select nodename, nodeport from pg_dist_node")
	if err != nil {
		return nil, err
	}
	nodes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
		Host string
		Port uint16
	}])
	if err != nil {
		return nil, err
	}
	for _, n := range nodes {
		at := to.Copy()
		at.Host, at.Port, at.Fallbacks = n.Host, n.Port, nil
		at.RuntimeParams["citus.enable_ddl_propagation"] = "off"
		if conn, err = pgx.ConnectConfig(ctx, at); err != nil {
			return nil, err
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

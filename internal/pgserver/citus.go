package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// ErrNoCitus is returned by StartCitus if no server binaries of this machine have the extension.
var ErrNoCitus = errors.New("no server binaries here have the extension citus (citus.control in their share directory)")

// Citus is a cluster of servers with the extension of that name: a coordinator, then its workers.
// Each answers every query.
type Citus struct {
	Nodes []*Server   // none of a cluster that was not started here
	At    []CitusNode // where they are
}

// CitusNode is a server as a client reaches it, and as the others do.
type CitusNode struct {
	ConnString string
	Host       string
	Port       int
}

// citusWorkers is the number of workers of a cluster.
const citusWorkers = 2

// StartCitus returns a cluster whose nodes reach each other through their sockets. Each new schema
// in it is a shard on one of the workers. The cluster has no database but postgres at first.
//
// ctx bounds the start only. Each node may be killed and restarted.
func StartCitus(ctx context.Context, opts Options) (*Citus, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	as, err := serverAccount()
	if err != nil {
		return nil, fmt.Errorf("pgserver: citus: %w", err)
	}
	in, err := usualPlaces().withCitus(ctx, as)
	if err != nil {
		return nil, fmt.Errorf("pgserver: citus: %w", err)
	}
	settings := map[string]string{
		"shared_preload_libraries":           "citus",
		"wal_level":                          "logical", // moves a shard
		"max_prepared_transactions":          "200",
		"citus.enable_schema_based_sharding": "on",
		"citus.node_conninfo":                "sslmode=disable",
		"citus.enable_statistics_collection": "off",
		"max_worker_processes":               "64", // a daemon for each database
	}
	maps.Copy(settings, opts.Settings)
	opts.Settings, opts.TCP = settings, false
	c := &Citus{}
	for range 1 + citusWorkers {
		node, err := startCluster(ctx, opts, in, as, nil)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("pgserver: citus: %w", err), c.Stop())
		}
		// Its name for itself, when it moves a shard.
		for _, sql := range []string{"alter system set citus.local_hostname = " + quoted(node.Dir()), "select pg_reload_conf()"} {
			if err := runOn(ctx, node.ConnString(), sql); err != nil {
				return nil, errors.Join(err, c.Stop(), node.Stop())
			}
		}
		c.Nodes, c.At = append(c.Nodes, node), append(c.At, CitusNode{node.ConnString(), node.Dir(), socketPort})
	}
	return c, nil
}

// CreateDatabase makes a database of that name on each node, and joins these. It returns a
// connection string for each node.
func (c *Citus) CreateDatabase(ctx context.Context, name string) ([]string, error) {
	var all []string
	for _, node := range c.At {
		if err := runOn(ctx, node.ConnString, "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
			return nil, err
		}
		all = append(all, WithDatabase(node.ConnString, name))
		if err := runOn(ctx, all[len(all)-1], "create extension citus"); err != nil {
			return nil, err
		}
	}
	for i, node := range c.At {
		join := "select citus_add_node($1, $2)"
		if i == 0 {
			join = "select citus_set_coordinator_host($1, $2)"
		}
		if err := runOn(ctx, all[0], join, node.Host, node.Port); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func runOn(ctx context.Context, connString, sql string, args ...any) error {
	conn, err := pgx.Connect(ctx, connString)
	if err != nil {
		return fmt.Errorf("pgserver: citus: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("pgserver: citus: %s: %w", sql, err)
	}
	return nil
}

// Stop stops all nodes.
func (c *Citus) Stop() error {
	var errs []error
	for _, node := range c.Nodes {
		errs = append(errs, node.Stop())
	}
	return errors.Join(errs...)
}

// withCitus is the first installation that has the extension.
func (p places) withCitus(ctx context.Context, as account) (installation, error) {
	found, _ := p.installed(ctx, as)
	for _, in := range found {
		share, err := in.shareDir(ctx, as)
		if err != nil {
			return installation{}, err
		}
		if _, err := os.Stat(filepath.Join(share, "extension", "citus.control")); err == nil {
			return in, nil
		}
	}
	return installation{}, ErrNoCitus
}

var sharePattern = regexp.MustCompile(`(?m)^share_path=(.+)$`)

// shareDir asks initdb, which every installation has.
func (in installation) shareDir(ctx context.Context, as account) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(in.dir, "initdb"), "--show", "-D", "/nonexistent")
	cmd.Dir, cmd.Env = "/", environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as.credential}
	out, err := cmd.CombinedOutput()
	match := sharePattern.FindSubmatch(out)
	if err != nil || match == nil {
		return "", fmt.Errorf("initdb --show in %s: %w %s", in.dir, err, out)
	}
	return string(match[1]), nil
}

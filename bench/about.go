package main

import (
	"context"
	"fmt"
	"runtime"

	"github.com/jackc/pgx/v5"
)

// server describes the server and the machine.
func (b *bench) server(ctx context.Context) (string, error) {
	conn, err := pgx.Connect(ctx, b.connString)
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var version, fsync, commit, pages string
	err = conn.QueryRow(ctx, `select current_setting('server_version'), current_setting('fsync'),
		current_setting('synchronous_commit'), current_setting('full_page_writes')`).Scan(&version, &fsync, &commit, &pages)
	return fmt.Sprintf("Postgres %s, fsync %s, synchronous_commit %s, full_page_writes %s; %d cores, %s",
		version, fsync, commit, pages, runtime.NumCPU(), runtime.Version()), err
}

// neededConnections are those of the largest comparison: three contenders with 64 clients each, or five with 32, and
// the watchers.
const neededConnections = 220

// checkServer warns before the measuring: of settings that make commits cheaper than durable ones, and of too few
// connections, since some figures do with less.
func (b *bench) checkServer(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, b.connString)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var off string
	var most int
	err = conn.QueryRow(ctx, `select coalesce(string_agg(name, ', ' order by name), ''), current_setting('max_connections')::int
		from pg_settings where name in ('fsync', 'synchronous_commit', 'full_page_writes') and setting = 'off'`).Scan(&off, &most)
	if off != "" {
		b.logf("WARNING: %s off: commits here are not durable, and no figure compares with those of a server where they are", off)
	}
	if err == nil && most < neededConnections {
		b.logf("max_connections is %d: figures with many clients need %d, and will fail", most, neededConnections)
	}
	return err
}

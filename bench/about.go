package main

import (
	"context"
	"fmt"
	"runtime"

	"github.com/jackc/pgx/v5"
)

// server says what is measured on.
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

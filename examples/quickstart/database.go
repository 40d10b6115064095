package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
)

// database is a database of this program's own, on a throwaway server or that of DATABASE_URL.
type database struct {
	server *pgserver.Server
	name   string
	pool   *pgxpool.Pool
}

func openDatabase(ctx context.Context, log io.Writer) (*database, error) {
	server, err := pgserver.Start(ctx, pgserver.Options{Durable: true, Log: indented{log}})
	if err != nil {
		return nil, err
	}
	d := &database{server: server, name: "metered_quickstart_" + strings.ToLower(rand.Text()[:10])}
	if err := d.admin(ctx, "create database %s template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C'"); err != nil {
		return nil, errors.Join(err, server.Stop())
	}
	config, err := configFor(server.ConnString(), d.name)
	if err == nil {
		d.pool, err = pgxpool.NewWithConfig(ctx, config)
	}
	if err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

func configFor(connString, database string) (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(connString)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.Database = database
	config.MaxConns = 16
	return config, nil
}

func (d *database) close() error {
	if d.pool != nil {
		d.pool.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // works after Ctrl-C too
	defer cancel()
	return errors.Join(d.admin(ctx, "drop database if exists %s with (force)"), d.server.Stop())
}

// admin runs a statement about the database from outside of it.
func (d *database) admin(ctx context.Context, format string) error {
	conn, err := pgx.Connect(ctx, d.server.ConnString())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	sql := fmt.Sprintf(format, pgx.Identifier{d.name}.Sanitize())
	if _, err := conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}

// uploadsSQL is the application's own table. It knows nothing of the library.
const uploadsSQL = `
create table uploads (
    id         bigint generated always as identity primary key,
    account    text not null,
    name       text not null,
    content    bytea not null,
    sha256     bytea,       -- this and the next by the worker
    media_type text
)`

func migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, uploadsSQL)
	return err
}

// counts is what there is in the database of all that a command writes.
type counts struct{ Entries, Operations, Spent, Rows, Jobs int }

func (c counts) String() string {
	return fmt.Sprintf("entries %d, operations %d, tokens spent %d, rows %d, jobs %d",
		c.Entries, c.Operations, c.Spent, c.Rows, c.Jobs)
}

const countsSQL = `
select (select count(*) from metered.ledger), (select count(*) from metered.operations),
    (select count(*) from metered.tokens where used > 0),
    (select count(*) from uploads), (select count(*) from river_job)`

func count(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}) (c counts, err error) {
	err = db.QueryRow(ctx, countsSQL).Scan(&c.Entries, &c.Operations, &c.Spent, &c.Rows, &c.Jobs)
	return c, err
}

// indented puts lines in the report's column.
type indented struct{ out io.Writer }

func (i indented) Write(line []byte) (int, error) {
	_, err := fmt.Fprintf(i.out, "  %s", line)
	return len(line), err
}

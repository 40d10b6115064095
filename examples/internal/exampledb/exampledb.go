// Package exampledb gives an example a database of its own: on the server of DATABASE_URL, or on a throwaway one (see
// package pgserver), and removed at the end. An application has a database already, and needs none of this.
package exampledb

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
)

// Options selects the database and its content. The zero value has metered's tables only.
type Options struct {
	// Jobs has River's tables made, too. Defaults to false.
	Jobs bool
	// SQL makes the application's own tables. Defaults to none.
	SQL string
	// Use is the connection string of a database to use, and to keep. Defaults to a new one, which is removed.
	Use string
	// Shared uses, and keeps, the database that DATABASE_URL names, or the one of a durable throwaway server that other
	// processes reach by ConnString. Defaults to false.
	Shared bool
	// Durable leaves a throwaway server as durable as it is by default. Defaults to false.
	Durable bool
}

// Database is the database of a program.
type Database struct {
	Pool       *pgxpool.Pool
	ConnString string           // for other processes of the program, and other pools
	server     *pgserver.Server // nil with Options.Use
	name       string           // of a database to remove
	workers    []worker
}

// Open makes a database whose name begins with "metered_" and the program's, or opens the one of opts. Call Close in
// the end.
func Open(ctx context.Context, program string, opts Options) (d *Database, err error) {
	d = &Database{ConnString: opts.Use}
	defer func() {
		if err != nil {
			d, err = nil, errors.Join(err, d.Close())
		}
	}()
	if opts.Use == "" {
		if err := d.create(ctx, program, opts); err != nil {
			return d, err
		}
	}
	config, err := pgxpool.ParseConfig(d.ConnString)
	if err != nil {
		return d, err
	}
	config.MaxConns = 16
	if d.Pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return d, err
	}
	if _, err := metered.Migrate(ctx, d.Pool, metered.MigrateOptions{River: opts.Jobs}); err != nil {
		return d, err
	}
	_, err = d.Pool.Exec(ctx, opts.SQL)
	return d, err
}

// create starts the server, if it has to, and makes the database.
func (d *Database) create(ctx context.Context, program string, opts Options) (err error) {
	d.server, err = pgserver.Start(ctx, pgserver.Options{Durable: opts.Durable || opts.Shared, TCP: opts.Shared, Log: os.Stderr})
	if err != nil {
		return err
	}
	if d.ConnString = d.server.ConnString(); opts.Shared {
		return nil
	}
	d.name = "metered_" + program + "_" + strings.ToLower(rand.Text()[:10])
	d.ConnString = pgserver.WithDatabase(d.ConnString, d.name)
	// After Ctrl-C, too, it is known whether there is a database to remove.
	creating, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	err = d.admin(creating, "create database %s template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C'")
	if err == nil {
		err = ctx.Err()
	}
	return err
}

// Throwaway reports whether the server ends with the program.
func (d *Database) Throwaway() bool { return d.server != nil && d.server.Owned() }

// Close stops the workers, closes the pool and removes the database, and the server if it is a throwaway one. It works after
// Ctrl-C, too. Connections that are still in use after 10 s are an error, and are cut.
func (d *Database) Close() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, w := range d.workers {
		err = errors.Join(err, w.StopAndCancel(ctx))
	}
	if d.Pool != nil {
		err = errors.Join(err, closePool(d.Pool))
	}
	if d.name != "" {
		err = errors.Join(err, d.admin(ctx, "drop database if exists %s with (force)"))
	}
	if d.server != nil {
		err = errors.Join(err, d.server.Stop())
	}
	return err
}

// closePool is Pool.Close, which waits for ever for connections that are in use, with a bound of 10 s.
func closePool(pool *pgxpool.Pool) error {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		pool.Close()
	}()
	select {
	case <-closed:
		return nil
	case <-time.After(time.Minute):
		return errors.New("connections of the pool are still in use")
	}
}

// admin runs a statement about the database from outside of it.
func (d *Database) admin(ctx context.Context, format string) error {
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

// Package exampledb gives an example a database of its own: on the server of DATABASE_URL, or on a throwaway one (see
// package pgserver), and removed at the end. An application has a database already, and needs none of this.
package exampledb

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgserver"
)

// Options selects the content of the database. The zero value is metered's tables only.
type Options struct {
	// Jobs has River's tables made, too. Defaults to false.
	Jobs bool
	// SQL makes the application's own tables. Defaults to none.
	SQL string
	// MaxConns is the size of the pool. Defaults to 16.
	MaxConns int32
	// Durable leaves a throwaway server as durable as it is by default. Defaults to false.
	Durable bool
	// Private starts a throwaway server even if DATABASE_URL is set, for a program that crashes it. Defaults to false.
	Private bool
	// Log gets a line on the server. Defaults to the standard error.
	Log io.Writer
}

const createTimeout = time.Minute // the machine may be busy

// Database is a database of this program's own.
type Database struct {
	Pool   *pgxpool.Pool
	server *pgserver.Server
	name   string
}

// Open makes a database whose name begins with "metered_" and the program's. Call Close in the end.
func Open(ctx context.Context, program string, opts Options) (*Database, error) {
	if opts.Log == nil {
		opts.Log = os.Stderr
	}
	server, err := pgserver.Start(ctx, pgserver.Options{Durable: opts.Durable, Private: opts.Private, Log: opts.Log})
	if err != nil {
		return nil, err
	}
	d := &Database{server: server, name: "metered_" + program + "_" + strings.ToLower(rand.Text()[:10])}
	// After Ctrl-C, too, it is known whether there is a database to remove.
	creating, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	err = d.admin(creating, "create database %s template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C'")
	cancel()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		d.Pool, err = newPool(ctx, d.ConnString(), opts.MaxConns)
	}
	if err == nil {
		err = fill(ctx, d.Pool, opts)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// Crash ends every process of a server that is Private with SIGKILL.
func (d *Database) Crash() error { return d.server.Kill() }

// Recover restarts the server with the files on its disk.
func (d *Database) Recover(ctx context.Context) error { return d.server.Restart(ctx) }

// ConnString is for other processes of the program, and other pools.
func (d *Database) ConnString() string { return pgserver.WithDatabase(d.server.ConnString(), d.name) }

// Server is for a program whose processes share a database, which it does not remove. That is the one of
// DATABASE_URL, or the one of a throwaway server which they reach by connString, until stop.
func Server(ctx context.Context) (connString string, throwaway bool, stop func() error, err error) {
	server, err := pgserver.Start(ctx, pgserver.Options{Durable: true, TCP: true, Log: os.Stderr})
	if err != nil {
		return "", false, nil, err
	}
	return server.ConnString(), server.Owned(), server.Stop, nil
}

// Close closes the pool and removes the database, and the server if it is a throwaway one. It works after Ctrl-C, too.
// Connections that are still in use after 10 s are an error, and are cut.
func (d *Database) Close() (err error) {
	if d.Pool != nil {
		err = ClosePool(d.Pool)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(err, d.admin(ctx, "drop database if exists %s with (force)"), d.server.Stop())
}

// ClosePool is Pool.Close, which waits for ever for connections that are in use, with a bound of 10 s.
func ClosePool(pool *pgxpool.Pool) error {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		pool.Close()
	}()
	select {
	case <-closed:
		return nil
	case <-time.After(10 * time.Second):
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

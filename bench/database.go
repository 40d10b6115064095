package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
)

// bench is the state that the figures share.
type bench struct {
	short      bool
	connString string
	databases  int
	log        io.Writer
	began      time.Time
	owned      bool          // the server was started here, and goes with everything in it
	thorough   bool          // measure the slow figures, too
	openFor    time.Duration // how long each contender runs beside an open snapshot
	plot       string        // the file for the curve of that, or ""

	templates map[string]string // a migrated database of each server

	shared  map[string]any // measurements that several figures use: see share
	closers []func()
}

func newBench(short bool, connString string) *bench {
	return &bench{
		short: short, connString: connString, thorough: !short,
		log: os.Stderr, began: time.Now(), shared: map[string]any{}, templates: map[string]string{},
	}
}

// close drops the shared databases.
func (b *bench) close() {
	for _, f := range b.closers {
		f()
	}
	b.closers = nil
}

// share makes a thing once, for all the figures that are read from it.
func share[T any](b *bench, name string, make func() (T, error)) (T, error) {
	if v, ok := b.shared[name]; ok {
		return v.(T), nil
	}
	v, err := make()
	if err == nil {
		b.shared[name] = v
	}
	return v, err
}

// pick returns the first value, or the second in a short run.
func (b *bench) pick(full, short int) int {
	if b.short {
		return short
	}
	return full
}

// slice is how long one contender runs in one round.
func (b *bench) slice() time.Duration { return time.Duration(b.pick(1200, 150)) * time.Millisecond }

func (b *bench) rounds() int { return b.pick(5, 3) }

func (b *bench) logf(format string, args ...any) { fmt.Fprintf(b.log, format+"\n", args...) }

// site is a migrated database of its own, with a pool on it.
type site struct {
	*pgxpool.Pool
	url  string // for connections that go past the pool's dialer
	drop func()
}

// options say how a pool reaches its database.
type options struct {
	server string // a connection string. Defaults to the bench's
	conns  int    // defaults to 8
	dial   pgconn.DialFunc
	setUp  string // SQL run first, as the owner
	tracer pgx.QueryTracer
}

// open makes a database of its own, which the site's drop deletes.
func (b *bench) open(ctx context.Context, o options) (*site, error) {
	o.server = cmp.Or(o.server, b.connString)
	template, err := b.template(ctx, o.server)
	if err != nil {
		return nil, err
	}
	name := b.newName()
	s := &site{url: pgserver.WithDatabase(o.server, name)}
	if s.Pool, err = o.pool(ctx, s.url); err != nil {
		return nil, err
	}
	s.drop = func() {
		s.Close()
		// Dropping is a checkpoint. A quick look leaves it to the end of the server.
		if !b.short || !b.owned {
			dropDatabase(ctx, o.server, name)
		}
	}
	err = execute(ctx, o.server, "create database "+name+" template "+template)
	if err == nil {
		err = execute(ctx, s.url, o.setUp)
	}
	if err != nil {
		s.drop()
		return nil, err
	}
	return s, nil
}

// pool has connections that stay, and no pings: only the contenders' own statements are measured.
func (o options) pool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = int32(cmp.Or(o.conns, 8))
	cfg.MaxConnLifetime, cfg.MaxConnIdleTime, cfg.HealthCheckPeriod = time.Hour, time.Hour, time.Hour
	cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	cfg.ConnConfig.Tracer = o.tracer
	if o.dial != nil {
		cfg.ConnConfig.DialFunc = o.dial
	}
	return pgxpool.NewWithConfig(ctx, cfg)
}

func (b *bench) newName() string {
	b.databases++
	return fmt.Sprintf("metered_bench_%d_%d", os.Getpid(), b.databases)
}

// template is a migrated database to copy, made for the first that wants one.
func (b *bench) template(ctx context.Context, server string) (string, error) {
	if name, ok := b.templates[server]; ok {
		return name, nil
	}
	name := b.newName()
	if err := execute(ctx, server, "create database "+name); err != nil {
		return "", err
	}
	if server == b.connString && !b.owned {
		b.closers = append(b.closers, func() { dropDatabase(ctx, server, name) })
	}
	pool, err := pgxpool.New(ctx, pgserver.WithDatabase(server, name))
	if err != nil {
		return "", err
	}
	defer pool.Close()
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err != nil {
		return "", err
	}
	b.templates[server] = name
	return name, nil
}

// execute runs SQL on a connection of its own.
func execute(ctx context.Context, url, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, sql)
	return err
}

// dropDatabase does so after an interrupt, too.
func dropDatabase(ctx context.Context, server, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	_ = execute(ctx, server, "drop database if exists "+name+" with (force)")
}

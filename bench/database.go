package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// bench is the state that the figures share.
type bench struct {
	short      bool
	connString string
	databases  int
	log        io.Writer
	began      time.Time
	owned      bool // the server was started here, and goes with everything in it
	thorough   bool // measure the slow figures, too

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

// leftOut is why a short run has no value of a slow figure.
const leftOut = "a short run leaves it out, unless it is named"

// slice is how long one contender runs in one round.
func (b *bench) slice() time.Duration {
	return time.Duration(b.pick(1200, 150)) * time.Millisecond
}

func (b *bench) rounds() int { return b.pick(5, 3) }

func (b *bench) logf(format string, args ...any) {
	fmt.Fprintf(b.log, format+"\n", args...)
}

// site is a migrated database of its own, with a pool on it.
type site struct {
	*pgxpool.Pool
	name string
	drop func()

	dialDirect pgconn.DialFunc
}

// options say how a pool reaches its database.
type options struct {
	server string // a connection string. Defaults to the bench's
	conns  int    // defaults to 8
	dial   func(context.Context, string, string) (net.Conn, error)
	setUp  []string // SQL run first, as the owner
}

// open makes a database of its own, which the site's drop deletes.
func (b *bench) open(ctx context.Context, o options) (s *site, err error) {
	if o.server == "" {
		o.server = b.connString
	}
	admin, err := pgx.Connect(ctx, o.server)
	if err != nil {
		return nil, err
	}
	s = &site{name: b.newName()}
	quoted := pgx.Identifier{s.name}.Sanitize()
	template, err := b.template(ctx, admin, o.server)
	if err == nil {
		_, err = admin.Exec(ctx, "create database "+quoted+" template "+template)
	}
	if err != nil {
		_ = admin.Close(ctx)
		return nil, err
	}
	s.drop = func() {
		if s.Pool != nil {
			s.Close()
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		// Dropping is a checkpoint. A quick look leaves it to the end of the server.
		if !b.short || !b.owned {
			_, _ = admin.Exec(ctx, "drop database "+quoted+" with (force)")
		}
		_ = admin.Close(ctx)
	}
	if err := s.fill(ctx, o); err != nil {
		s.drop()
		return nil, err
	}
	return s, nil
}

func (b *bench) newName() string {
	b.databases++
	return fmt.Sprintf("metered_bench_%d_%d", os.Getpid(), b.databases)
}

// template is a migrated database to copy, made for the first that wants one.
func (b *bench) template(ctx context.Context, admin *pgx.Conn, server string) (string, error) {
	if name, ok := b.templates[server]; ok {
		return name, nil
	}
	cfg, err := pgxpool.ParseConfig(server)
	if err != nil {
		return "", err
	}
	cfg.ConnConfig.Database = b.newName()
	quoted := pgx.Identifier{cfg.ConnConfig.Database}.Sanitize()
	if _, err := admin.Exec(ctx, "create database "+quoted); err != nil {
		return "", err
	}
	if server == b.connString && !b.owned {
		b.closers = append(b.closers, func() {
			if conn, err := pgx.Connect(context.WithoutCancel(ctx), server); err == nil {
				_, _ = conn.Exec(context.WithoutCancel(ctx), "drop database "+quoted+" with (force)")
				_ = conn.Close(context.WithoutCancel(ctx))
			}
		})
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return "", err
	}
	defer pool.Close()
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err != nil {
		return "", err
	}
	b.templates[server] = quoted
	return quoted, nil
}

// fill sets up and connects. The former goes past o.dial.
func (s *site) fill(ctx context.Context, o options) error {
	cfg, err := pgxpool.ParseConfig(o.server)
	if err != nil {
		return err
	}
	cfg.ConnConfig.Database = s.name
	direct, err := pgx.ConnectConfig(ctx, cfg.ConnConfig.Copy())
	if err != nil {
		return err
	}
	defer direct.Close(context.WithoutCancel(ctx))
	for _, sql := range o.setUp {
		if _, err := direct.Exec(ctx, sql); err != nil {
			return err
		}
	}
	cfg.MaxConns = int32(o.conns)
	if o.conns == 0 {
		cfg.MaxConns = 8
	}
	// Connections that stay, and no pings: only the contenders' own statements are measured.
	cfg.MaxConnLifetime, cfg.MaxConnIdleTime, cfg.HealthCheckPeriod = time.Hour, time.Hour, time.Hour
	cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	s.dialDirect = cfg.ConnConfig.DialFunc
	if o.dial != nil {
		cfg.ConnConfig.DialFunc = o.dial
	}
	s.Pool, err = pgxpool.NewWithConfig(ctx, cfg)
	return err
}

// direct is how to reach the database past the pool's dialer.
func (s *site) direct() *pgx.ConnConfig {
	cfg := s.Config().ConnConfig.Copy()
	cfg.DialFunc = s.dialDirect
	return cfg
}

// connect opens all connections of the pool.
func (s *site) connect(ctx context.Context) error {
	conns := make([]*pgxpool.Conn, 0, s.Config().MaxConns)
	defer func() {
		for _, c := range conns {
			c.Release()
		}
	}()
	for range s.Config().MaxConns {
		c, err := s.Acquire(ctx)
		if err != nil {
			return err
		}
		conns = append(conns, c)
	}
	return nil
}

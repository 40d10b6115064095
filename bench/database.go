package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// bench is what the figures share.
type bench struct {
	short      bool
	connString string
	databases  int
}

// pick returns the first value, or the second in a short run.
func (b *bench) pick(full, short int) int {
	if b.short {
		return short
	}
	return full
}

// database makes a migrated database of its own and returns a pool on it; drop
// ends both. setUp is run in it first, as the owner.
func (b *bench) database(ctx context.Context, setUp ...string) (pool *pgxpool.Pool, drop func(), err error) {
	admin, err := pgx.Connect(ctx, b.connString)
	if err != nil {
		return nil, nil, err
	}
	b.databases++
	name := pgx.Identifier{fmt.Sprintf("metered_bench_%d_%d", time.Now().Unix(), b.databases)}.Sanitize()
	if _, err := admin.Exec(ctx, "create database "+name); err != nil {
		return nil, nil, err
	}
	drop = func() {
		if pool != nil {
			pool.Close()
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		_, _ = admin.Exec(ctx, "drop database "+name+" with (force)")
		_ = admin.Close(ctx)
	}
	cfg, err := pgxpool.ParseConfig(b.connString)
	if err != nil {
		drop()
		return nil, nil, err
	}
	cfg.ConnConfig.Database = name[1 : len(name)-1]
	if pool, err = pgxpool.NewWithConfig(ctx, cfg); err == nil {
		err = metered.Migrate(ctx, pool, metered.MigrateOptions{River: true})
	}
	for _, sql := range setUp {
		if err == nil {
			_, err = pool.Exec(ctx, sql)
		}
	}
	if err != nil {
		drop()
		return nil, nil, err
	}
	return pool, drop, nil
}

// timed returns the seconds that f takes for n calls.
func timed(n int, f func() error) (float64, error) {
	began := time.Now()
	for range n {
		if err := f(); err != nil {
			return 0, err
		}
	}
	return time.Since(began).Seconds(), nil
}

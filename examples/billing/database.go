package main

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

// shopSQL is the application's own: it knows nothing of the library. Money is in cents.
const shopSQL = `
create table items (
    sku   text primary key,
    cents bigint not null,
    stock int not null check (stock >= 0)
);
create table orders (
    id        text primary key,
    account   text not null,
    sku       text not null references items,
    cents     bigint not null,
    entry     bigint not null,      -- the charge, in the ledger of the account
    cancelled timestamptz
);
create table shipments (
    order_id text primary key,
    address  text not null check (address <> '')
)`

// openDatabase makes a database of this program's own, on the server of DATABASE_URL or a throwaway one. What it returns
// removes it again.
func openDatabase(ctx context.Context) (pool *pgxpool.Pool, remove func() error, err error) {
	server, err := pgserver.Start(ctx, pgserver.Options{Log: os.Stderr})
	if err != nil {
		return nil, nil, err
	}
	name := pgx.Identifier{"metered_billing_" + strings.ToLower(rand.Text()[:10])}
	remove = func() error {
		if pool != nil {
			pool.Close()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // works after Ctrl-C too
		defer cancel()
		return errors.Join(admin(ctx, server, "drop database if exists "+name.Sanitize()+" with (force)"), server.Stop())
	}
	if err := admin(ctx, server, "create database "+name.Sanitize()+" template template0 encoding 'UTF8'"); err != nil {
		return nil, nil, errors.Join(err, server.Stop())
	}
	config, err := pgxpool.ParseConfig(server.ConnString())
	if err == nil {
		config.ConnConfig.Database, config.MaxConns = name[0], 16
		pool, err = pgxpool.NewWithConfig(ctx, config)
	}
	if err == nil {
		err = migrate(ctx, pool)
	}
	if err != nil {
		return nil, nil, errors.Join(err, remove())
	}
	return pool, remove, nil
}

func admin(ctx context.Context, server *pgserver.Server, sql string) error {
	conn, err := pgx.Connect(ctx, server.ConnString())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}

func migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if err := metered.Migrate(ctx, pool, metered.MigrateOptions{}); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, shopSQL)
	return err
}

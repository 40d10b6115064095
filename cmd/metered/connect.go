package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
)

const connectTimeout = 10 * time.Second

// open returns a pool on the database. It has answered once.
func (a *app) open(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(cmp.Or(a.url, os.Getenv("DATABASE_URL")))
	if err != nil {
		return nil, err
	}
	config.MaxConns = 4
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = connectTimeout
	}
	if params := config.ConnConfig.RuntimeParams; params["application_name"] == "" {
		params["application_name"] = "metered"
	}
	if a.configure != nil {
		a.configure(config)
	}
	a.user = cmp.Or(config.ConnConfig.RuntimeParams["role"], config.ConnConfig.User)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// with runs f with a pool on a database whose schema this build works with, once it is sure that
// the role may execute the functions.
func (a *app) with(ctx context.Context, f func(pool *pgxpool.Pool) error, functions ...string) error {
	pool, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := a.usable(ctx, pool); err != nil {
		return err
	}
	if err := a.may(ctx, pool, functions); err != nil {
		return err
	}
	return f(pool)
}

// read runs f in a READ ONLY transaction, which sees one snapshot.
func (a *app) read(ctx context.Context, f func(tx pgx.Tx) error) error {
	return a.with(ctx, func(pool *pgxpool.Pool) error { return readOnly(ctx, pool, f) })
}

func readOnly(ctx context.Context, pool *pgxpool.Pool, f func(tx pgx.Tx) error) error {
	// With old statistics the planner would compile a statement (jit): half a second for 10 ms of
	// work.
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: "begin isolation level repeatable read read only; set local jit = off"}, f)
}

const versionSQL = `select coalesce(pg_catalog.max(version), 0) from metered.schema_version`

// usable reports a version of the schema that this build cannot use.
func (a *app) usable(ctx context.Context, pool *pgxpool.Pool) error {
	name, err := schema.Parse(a.schema)
	if err != nil {
		return err
	}
	var installed int
	err = readOnly(ctx, pool, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, name.SQL(versionSQL)).Scan(&installed)
	})
	switch err = fault.Failed("metered", "look for schema "+a.schema, err); {
	case errors.Is(err, budget.ErrNotMigrated):
		return &schemaError{budget.ErrNotMigrated,
			fmt.Sprintf("database %s has no schema %s of metered: create it with metered migrate up, or name another with --schema",
				pool.Config().ConnConfig.Database, a.schema)}
	case err != nil:
		return err
	case installed < 1:
		return &schemaError{metered.ErrSchemaDiffers,
			fmt.Sprintf("schema %s cannot be used: table schema_version says no version, see metered migrate validate", a.schema)}
	case installed < metered.SchemaVersion:
		return &schemaError{budget.ErrNotMigrated,
			fmt.Sprintf("schema %s is of version %d, this build needs %d: upgrade it with metered migrate up",
				a.schema, installed, metered.SchemaVersion)}
	case installed > metered.SchemaVersion+1:
		return &schemaError{metered.ErrSchemaVersion,
			fmt.Sprintf("schema %s is of version %d, this build knows %d: use a newer build",
				a.schema, installed, metered.SchemaVersion)}
	}
	return nil
}

const maySQL = `
select coalesce(pg_catalog.bool_and(pg_catalog.has_function_privilege(p.oid, 'execute')), true)
from pg_proc p where p.pronamespace = pg_catalog.to_regnamespace($1)::oid and p.proname = any ($2)`

// may refuses a role that may not execute the functions, before any read or question.
func (a *app) may(ctx context.Context, pool *pgxpool.Pool, functions []string) error {
	if len(functions) == 0 {
		return nil
	}
	var all bool
	err := readOnly(ctx, pool, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, maySQL, a.schema, functions).Scan(&all)
	})
	if err == nil && !all {
		return fmt.Errorf("%w: it may not execute %s", budget.ErrNotGranted, functions[0])
	}
	return err
}

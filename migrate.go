package metered

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/schema"
)

//go:generate go run ./internal/schema/render schema.sql

// SchemaVersion is the version of the schema that this release creates and
// needs.
const SchemaVersion = 2

// SchemaSQL renders every table, index and function for the named schema (""
// means "metered"), for the migration tool of your choice. Run it once, in a
// transaction, as the role that is to own the data; Migrate afterwards sees its
// version and leaves it alone.
//
// The name is 1 to 63 of a-z, 0-9 and _, and starts with neither a digit nor
// "pg_". Anything else is ErrArgument.
func SchemaSQL(name string) (string, error) {
	n, err := parseSchema("schema", name)
	if err != nil {
		return "", err
	}
	return n.SQL(schema.Source()), nil
}

// MigrateOptions says what Migrate creates. The zero value creates the schema
// "metered" and nothing else.
type MigrateOptions struct {
	// Schema is the name of the schema to create. Defaults to "metered".
	Schema string

	// River also brings River's own tables to the latest version that this
	// build of River knows. Defaults to false: many programs migrate River
	// themselves.
	River bool

	// RiverSchema is where River's tables go. Defaults to the connection's
	// search_path, as with River itself.
	RiverSchema string
}

// Migrate creates the library's schema, or does nothing where it is there
// already. It may be called by any number of processes at once, at every start:
// they queue on an advisory lock, and the first one does the work, in one
// transaction. With River set, River's migrations follow, each in a transaction that takes
// the lock again. It works through a pooler in transaction mode.
//
// Migrate owns its transactions, and holds one connection of pool. The role that runs it
// becomes the owner of all it creates. If an empty schema is there already, the role must
// own it, and needs no right to create schemas. A schema newer than SchemaVersion is
// ErrSchemaVersion.
func Migrate(ctx context.Context, pool *pgxpool.Pool, opts MigrateOptions) error {
	if err := notNil("pool", pool); err != nil {
		return err
	}
	name, err := parseSchema("MigrateOptions.Schema", opts.Schema)
	if err != nil {
		return err
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("metered: migrate: %w", err)
	}
	defer conn.Release()
	err = locked(ctx, conn, func(tx pgx.Tx) error { return migrateSchema(ctx, tx, name) })
	if err != nil {
		return fmt.Errorf("metered: migrate schema %s: %w", name, err)
	}
	if !opts.River {
		return nil
	}
	if err := migrateRiver(ctx, conn, opts.RiverSchema); err != nil {
		return fmt.Errorf("metered: migrate river: %w", err)
	}
	return nil
}

// migrationLock is the advisory lock that migrations queue on.
var migrationLock = lockkey.Of("metered/migrate", "")

// locked runs f in a transaction that holds the migration lock: one of the session
// would stay behind on a server connection of a pooler's. At READ COMMITTED, so that f
// sees what the migration did that it waited for.
func locked(ctx context.Context, conn *pgxpool.Conn, f func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", migrationLock); err != nil {
			return fmt.Errorf("waiting for another migration: %w", err)
		}
		return f(tx)
	})
}

const schemaVersionSQL = `select max(version) from metered.schema_version`

func migrateSchema(ctx context.Context, tx pgx.Tx, name schema.Name) error {
	var exists bool
	if err := tx.QueryRow(ctx, "select to_regclass($1) is not null", name.SQL("metered.schema_version")).Scan(&exists); err != nil {
		return err
	}
	if exists {
		var version int
		if err := tx.QueryRow(ctx, name.SQL(schemaVersionSQL)).Scan(&version); err != nil {
			return err
		}
		if version > SchemaVersion {
			return fmt.Errorf("%w: the database has version %d, this build knows %d", ErrSchemaVersion, version, SchemaVersion)
		}
		return nil
	}
	// Without arguments Exec uses the simple protocol, which takes the whole file.
	_, err := tx.Exec(ctx, name.SQL(schema.Source()), pgx.QueryExecModeSimpleProtocol)
	return err
}

// migrateRiver makes one migration of River's per transaction, since some need that an earlier
// one has committed. Each looks anew, under the lock, at what is left to do.
func migrateRiver(ctx context.Context, conn *pgxpool.Conn, riverSchema string) error {
	migrator, err := rivermigrate.New(riverpgxv5.New(nil), &rivermigrate.Config{Schema: riverSchema})
	if err != nil {
		return err
	}
	for done := false; !done && err == nil; {
		err = locked(ctx, conn, func(tx pgx.Tx) error {
			//lint:ignore SA1019 it is deprecated for several migrations in one transaction
			result, err := migrator.MigrateTx(ctx, tx, rivermigrate.DirectionUp, &rivermigrate.MigrateOpts{MaxSteps: 1})
			done = err == nil && len(result.Versions) == 0
			return err
		})
	}
	return err
}

func parseSchema(field, name string) (schema.Name, error) {
	n, err := schema.Parse(name)
	if err != nil {
		return schema.Name{}, invalid(field, "%s", err)
	}
	return n, nil
}

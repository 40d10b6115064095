package pgtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
)

// prepare fills an empty database with the schema and River's tables.
func prepare(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, os.Getenv(MutantEnv))
	return err
}

const packedSQL = `select oid::regclass::text from pg_class
	where relnamespace = 'pg_catalog'::regnamespace and relkind = 'r' and not relisshared`

// pack leaves the catalogs fewer files, of which each copy has one the less. What a connection reads
// at its start is written by the first one after that.
func pack(ctx context.Context, pool *pgxpool.Pool) error {
	rows, err := pool.Query(ctx, packedSQL)
	if err != nil {
		return err
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, table := range tables {
		if _, err := pool.Exec(ctx, "vacuum full "+table); err != nil {
			return err
		}
	}
	pool.Reset()
	_, err = pool.Exec(ctx, "select")
	return err
}

// Template is a database that a binary makes once, and of which tests get copies.
type Template struct {
	Fill func(ctx context.Context, pool *pgxpool.Pool) error // of an empty database

	once sync.Once
	name string
	err  error
}

// in returns the template's database.
func (t *Template) in(ctx context.Context, c *cluster) (name string, err error) {
	t.once.Do(func() {
		if t.name, t.err = c.createDatabase(ctx, true); t.err == nil {
			t.err = fill(ctx, pgserver.WithDatabase(c.server.ConnString(), t.name), t.Fill)
		}
	})
	return t.name, t.err
}

// fill leaves no connection open, since each would be in the way of a copy.
func fill(ctx context.Context, connString string, with func(context.Context, *pgxpool.Pool) error) error {
	pool, err := pgxpool.New(ctx, connString)
	if err != nil {
		return err
	}
	defer pool.Close()
	return with(ctx, pool)
}

// MutantEnv is the environment variable with SQL that breaks the schema of every test, to see which
// of them notices.
const MutantEnv = "METERED_TEST_MUTANT"

// schemaHash identifies the result of prepare and pack: the schema's text and River's migrations.
var schemaHash = sync.OnceValues(func() (string, error) {
	sql, err := metered.SchemaSQL(metered.SchemaSQLOptions{})
	if err != nil {
		return "", err
	}
	river, err := rivermigrate.New(riverpgxv5.New(nil), nil)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	fmt.Fprintf(hash, "%d %s %s %s", len(sql), sql, os.Getenv(MutantEnv), packedSQL)
	for _, migration := range river.AllVersions() {
		fmt.Fprintf(hash, "%d %d %s", migration.Version, len(migration.SQLUp), migration.SQLUp)
	}
	return hex.EncodeToString(hash.Sum(nil)[:8]), nil
})

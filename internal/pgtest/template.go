package pgtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgmetered/metered"
)

// prepare fills an empty database with the schema and River's tables.
func prepare(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, os.Getenv(MutantEnv))
	return err
}

// MutantEnv is the environment variable with SQL that breaks the schema of every test, to see which of them notices.
const MutantEnv = "METERED_TEST_MUTANT"

// schemaHash identifies the result of prepare: the schema's text and River's migrations.
func schemaHash() (string, error) {
	sql, err := metered.SchemaSQL(metered.SchemaSQLOptions{})
	if err != nil {
		return "", err
	}
	river, err := rivermigrate.New(riverpgxv5.New(nil), nil)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	fmt.Fprintf(hash, "%d %s %s", len(sql), sql, os.Getenv(MutantEnv))
	for _, migration := range river.AllVersions() {
		fmt.Fprintf(hash, "%d %d %s", migration.Version, len(migration.SQLUp), migration.SQLUp)
	}
	return hex.EncodeToString(hash.Sum(nil)[:8]), nil
}

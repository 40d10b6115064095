package pgtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgmetered/metered"
)

// upgradedFrom names an earlier version of the schema: tests then run on one that was upgraded from
// it, instead of on a fresh one.
var upgradedFrom, _ = strconv.Atoi(os.Getenv("METERED_TEST_UPGRADED_FROM"))

// prepare puts into an empty database what tests find there.
func prepare(ctx context.Context, pool *pgxpool.Pool) error {
	if upgradedFrom > 0 {
		text, err := versionSQL(upgradedFrom, "")
		if err == nil {
			_, err = pool.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol)
		}
		if err != nil {
			return err
		}
	}
	_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true})
	return err
}

// schemaHash names what prepare makes: the schema's text and River's migrations.
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
	fmt.Fprintf(hash, "%d %d %s", upgradedFrom, len(sql), sql)
	for _, migration := range river.AllVersions() {
		fmt.Fprintf(hash, "%d %d %s", migration.Version, len(migration.SQLUp), migration.SQLUp)
	}
	return hex.EncodeToString(hash.Sum(nil)[:8]), nil
}

package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/schema"
)

// Migrate is Migrate where it must not fail.
func Migrate(t testing.TB, pool *pgxpool.Pool, opts metered.MigrateOptions) metered.MigrateReport {
	t.Helper()
	report, err := metered.Migrate(t.Context(), pool, opts)
	require.NoError(t, err)
	return report
}

func Validate(t testing.TB, db schema.DB) metered.SchemaReport {
	t.Helper()
	report, err := metered.Validate(t.Context(), db, "")
	require.NoError(t, err)
	return report
}

func Execute(t testing.TB, pool *pgxpool.Pool, sql string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}

// What River's insert needs, and no more.
const RiverGrantSQL = `
grant select, insert, update on river_job, river_queue to $role;
grant usage on sequence river_job_id_seq to $role`

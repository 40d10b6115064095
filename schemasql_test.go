package metered_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// apply runs the text as one query, as a migration tool does.
func apply(t *testing.T, pool *pgxpool.Pool, opts metered.SchemaSQLOptions) error {
	t.Helper()
	text, err := metered.SchemaSQL(opts)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), text, pgx.QueryExecModeSimpleProtocol)
	return err
}

// Step by step, as a tool's files are run.
func TestSchemaSQL_DoesWhatMigrateDoes(t *testing.T) {
	t.Parallel()
	fresh := openFresh(t)
	for _, name := range []string{"metered", "money_1"} {
		earlierVersions(t, func(t *testing.T, version int) {
			pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
			n, err := schema.Parse(name)
			require.NoError(t, err)
			execute(t, pool, n.SQL(pgtest.VersionSQL(t, version, "")))
			before, err := metered.Validate(t.Context(), pool, name)
			require.NoError(t, err)
			require.Equal(t, version, before.Version)
			require.NoError(t, apply(t, pool, metered.SchemaSQLOptions{Schema: name, From: version}))
			require.ErrorContains(t, apply(t, pool, metered.SchemaSQLOptions{Schema: name, From: version}), "the schema is not of version")
			after, err := metered.Validate(t.Context(), pool, name)
			require.NoError(t, err)
			require.NoError(t, after.Err())

			execute(t, pool, "drop function "+name+".clock()")
			require.NoError(t, apply(t, pool, metered.SchemaSQLOptions{Schema: name, From: metered.SchemaVersion}))
			require.NoError(t, apply(t, pool, metered.SchemaSQLOptions{Schema: name, From: metered.SchemaVersion, DropPrevious: true}))
			if name == "metered" {
				requireSame(t, fresh, pool)
			}
			report := migrate(t, pool, metered.MigrateOptions{Schema: name})
			require.Equal(t, metered.MigrateReport{From: metered.SchemaVersion, To: metered.SchemaVersion}, report)
		})
	}
}

func TestSchemaSQL_MarksStatementsForTheTool(t *testing.T) {
	t.Parallel()
	texts := make(map[metered.MigrationTool]string)
	for _, tool := range []metered.MigrationTool{metered.PlainSQL, metered.Goose, metered.GolangMigrate, metered.Tern, metered.Atlas} {
		for from := range metered.SchemaVersion + 1 {
			var err error
			texts[tool], err = metered.SchemaSQL(metered.SchemaSQLOptions{From: from, Tool: tool})
			require.NoError(t, err)
			require.NotContains(t, strings.ReplaceAll(texts[tool], `{{"{{"}}`, ""), "{{", "tern takes it for a template")
		}
	}
	require.True(t, strings.HasPrefix(texts[metered.Goose], "-- +goose Up\n"))
	require.Equal(t, strings.Count(texts[metered.Goose], "$$"), 2*strings.Count(texts[metered.Goose], "StatementEnd"))
	for _, opts := range []metered.SchemaSQLOptions{{From: -1}, {From: metered.SchemaVersion + 1}, {Tool: "flyway"}, {Schema: "A"}} {
		_, err := metered.SchemaSQL(opts)
		require.ErrorIs(t, err, metered.ErrArgument)
	}
}

package integration_test

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"slices"
	"testing"
	"testing/fstest"
	"time"

	atlas "ariga.io/atlas/sql/migrate"
	atlaspostgres "ariga.io/atlas/sql/postgres"
	gomigrate "github.com/golang-migrate/migrate/v4"
	gomigratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	tern "github.com/jackc/tern/v2/migrate"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// tools run all files of a directory, in order, as their own programs do.
var tools = map[string]struct {
	file string // of a number
	run  func(t *testing.T, pool *pgxpool.Pool, files fs.FS)
}{
	"goose": {"%05d_metered.sql", func(t *testing.T, pool *pgxpool.Pool, files fs.FS) {
		provider, err := goose.NewProvider(goose.DialectPostgres, openDB(t, pool), files)
		require.NoError(t, err)
		_, err = provider.Up(t.Context())
		require.NoError(t, err)
	}},
	"golang-migrate": {"%06d_metered.up.sql", func(t *testing.T, pool *pgxpool.Pool, files fs.FS) {
		source, err := iofs.New(files, ".")
		require.NoError(t, err)
		driver, err := gomigratepgx.WithInstance(openDB(t, pool), &gomigratepgx.Config{})
		require.NoError(t, err)
		m, err := gomigrate.NewWithInstance("files", source, "postgres", driver)
		require.NoError(t, err)
		require.NoError(t, m.Up())
	}},
	"tern": {"%03d_metered.sql", func(t *testing.T, pool *pgxpool.Pool, files fs.FS) {
		conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		m, err := tern.NewMigrator(t.Context(), conn, "public.tern_version")
		require.NoError(t, err)
		require.NoError(t, m.LoadMigrations(files))
		require.NoError(t, m.Migrate(t.Context()))
	}},
	"atlas": {"%014d_metered.sql", func(t *testing.T, pool *pgxpool.Pool, files fs.FS) {
		dir := new(atlas.MemDir)
		names, err := fs.Glob(files, "*.sql")
		require.NoError(t, err)
		for _, name := range names {
			text, err := fs.ReadFile(files, name)
			require.NoError(t, err)
			require.NoError(t, dir.WriteFile(name, text))
		}
		sum, err := dir.Checksum()
		require.NoError(t, err)
		require.NoError(t, atlas.WriteSumFile(dir, sum))
		driver, err := atlaspostgres.Open(openDB(t, pool))
		require.NoError(t, err)
		executor, err := atlas.NewExecutor(driver, dir, atlas.NopRevisionReadWriter{}, atlas.WithAllowDirty(true))
		require.NoError(t, err)
		require.NoError(t, executor.ExecuteN(t.Context(), 0))
	}},
}

func openDB(t *testing.T, pool *pgxpool.Pool) *sql.DB {
	t.Helper()
	db := stdlib.OpenDB(*pool.Config().ConnConfig)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// Each tool makes a schema, or upgrades one to a made-up next version and then drops the functions that only this
// build calls.
func TestSchemaSQL_IsRunByMigrationTools(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	n, err := schema.Parse("")
	require.NoError(t, err)
	next := pgtest.Next(t)
	for name, tool := range tools {
		run := func(t *testing.T, pool *pgxpool.Pool, texts ...string) {
			files := make(fstest.MapFS)
			for i, text := range texts {
				files[fmt.Sprintf(tool.file, i+1)] = &fstest.MapFile{Data: []byte(text)}
			}
			tool.run(t, pool, files)
			c, err := metered.New(pool, metered.Config{})
			require.NoError(t, err)
			verified, err := c.Budget.Verify(t.Context(), pool, budget.VerifyOptions{})
			require.NoError(t, err)
			require.Empty(t, verified.Differences)
		}
		t.Run(fmt.Sprintf("%s/a fresh schema", name), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
			text, err := metered.SchemaSQL(metered.SchemaSQLOptions{Tool: name})
			require.NoError(t, err)
			run(t, pool, text)
			report, err := metered.Validate(t.Context(), pool, "")
			require.NoError(t, err)
			require.Equal(t, metered.SchemaReport{Version: metered.SchemaVersion}, report)
			c, err := metered.New(pool, metered.Config{})
			require.NoError(t, err)
			_, err = metered.Do[any](t.Context(), c, metered.Command{ID: "op", Charges: []budget.Charge{
				{Scope: "s", Amount: 1, Limits: []budget.Limit{{Max: 1, Window: time.Hour}}}}}, nil)
			require.NoError(t, err)
		})
		t.Run(fmt.Sprintf("%s/an upgrade", name), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Open(t)
			run(t, pool, next.Script(n, schema.Version, false, string(name)), next.Script(n, next.Version, true, string(name)))
			c, err := next.Read(t.Context(), pool, n)
			require.NoError(t, err)
			require.Equal(t, next.Version, c.Version)
			require.Empty(t, c.Differences())
			require.False(t, slices.ContainsFunc(next.Previous(), c.Has))
		})
	}
}

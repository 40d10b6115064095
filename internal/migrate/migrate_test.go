package migrate_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// The short form finds a migration without its lock.
func TestMigrate_IsSafeAtOnceAndAgain(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true, MaxConns: 40})
	require.Zero(t, relations(t, pool, "metered"), "nothing is created unless Migrate is called")

	var wg sync.WaitGroup
	for range pgtest.Size(4, 16) {
		wg.Go(func() {
			if _, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{River: true}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.Zero(t, pgtest.Value[int](t, pool, `select count(*) from pg_locks l join pg_database d on d.oid = l.database
		where d.datname = current_database() and l.locktype = 'advisory'`), "a lock was left behind")
	var installed time.Time
	require.NoError(t, pool.QueryRow(t.Context(), `select installed_at from metered.schema_version where version = $1`, metered.SchemaVersion).Scan(&installed))
	pgtest.Migrate(t, pool, metered.MigrateOptions{River: true})
	var again time.Time
	require.NoError(t, pool.QueryRow(t.Context(), `select max(installed_at) from metered.schema_version`).Scan(&again))
	require.Equal(t, installed, again)
	require.Positive(t, relations(t, pool, "public"), "River's tables were asked for")
}

// River's migrations need no second connection. Each takes the lock by itself, so that many
// pools, and many callers of one, can be at it at once. The short form finds a migration of River's without its lock.
func TestMigrate_WorksWithOneConnection(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx, cancel := pgtest.Patient(t)
	defer cancel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	single := func(c *pgxpool.Config) { c.MaxConns = 1 }
	// River's own first steps are gone on from.
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	require.NoError(t, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, &rivermigrate.MigrateOpts{TargetVersion: 4})
	require.NoError(t, err)

	pools := make([]*pgxpool.Pool, pgtest.Size(2, 4))
	for i := range pools {
		pools[i] = pgtest.Reopen(t, pool, single)
	}
	pgtest.AtOnce(2*len(pools), func(i int) {
		if _, err := metered.Migrate(ctx, pools[i/2], metered.MigrateOptions{River: true}); err != nil {
			t.Error(err)
		}
	})
	versions, err := migrator.Validate(ctx, nil)
	require.NoError(t, err)
	require.True(t, versions.OK, versions.Messages)
	require.Equal(t, len(migrator.AllVersions()), pgtest.Count(t, pool, "river_migration"))

	_, err = pool.Exec(ctx, "create schema elsewhere")
	require.NoError(t, err)
	pgtest.Migrate(t, pools[0], metered.MigrateOptions{River: true, RiverSchema: "elsewhere"})
	require.Equal(t, len(migrator.AllVersions()), pgtest.Count(t, pool, "elsewhere.river_migration"))
}

// Behind a pooler of transactions the next statement may come to another session.
func TestMigrate_LeavesNothingToItsSession(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, w := pgtest.Tap(t, pgtest.OpenWith(t, pgtest.Options{Empty: true}), nil)
	w.Each(nil)
	pgtest.Migrate(t, pool, metered.MigrateOptions{River: true})
	open, locks := map[*pgtest.Tapped]bool{}, 0
	for _, f := range w.Sent() {
		for _, sql := range f.SQL {
			switch word, _, _ := strings.Cut(sql, " "); word {
			case "begin":
				open[f.Conn] = true
			case "commit", "rollback":
				open[f.Conn] = false
			}
			if strings.Contains(sql, "select pg_catalog.pg_advisory_") {
				locks++
				require.True(t, open[f.Conn], sql)
				require.Contains(t, sql, "_xact_lock")
			}
		}
	}
	migrator, err := rivermigrate.New(riverpgxv5.New(nil), nil)
	require.NoError(t, err)
	require.Equal(t, 1+len(migrator.AllVersions())+1, locks, "its own, River's, and the look that finds nothing more")
}

// A schema that was made for a role which may not make schemas.
func TestMigrate_NeedsNoMoreThanToOwnTheSchema(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	role := fmt.Sprintf("owner_%d", time.Now().UnixNano())
	names := pgtest.Size([]string{"select"}, []string{"metered", "select"}) // "select" has to be quoted
	for _, name := range names {
		_, err := pool.Exec(t.Context(), fmt.Sprintf(`do $$ begin create role %[1]s; exception when duplicate_object then null; end $$;
			create schema "%[2]s" authorization %[1]s`, role, name))
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		_, err := pool.Exec(context.Background(), fmt.Sprintf(`drop owned by %[1]s cascade; drop role %[1]s`, role))
		require.NoError(t, err)
	})
	owner := pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "set role "+role)
			return err
		}
	})
	for _, name := range names {
		pgtest.Migrate(t, owner, metered.MigrateOptions{Schema: name})
		require.Positive(t, relations(t, pool, name))
	}
	_, err := metered.Migrate(t.Context(), owner, metered.MigrateOptions{Schema: "another"})
	require.Error(t, err)
}

func TestSchemaNames_AreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Nowhere(t)
	for _, name := range []string{"Metered", "a-b", `a"b`, "1a", "pg_metered", "a.b", strings.Repeat("a", 64), "é", " "} {
		_, err := metered.SchemaSQL(metered.SchemaSQLOptions{Schema: name})
		require.ErrorIs(t, err, budget.ErrArgument, name)
		_, err = metered.Migrate(t.Context(), pool, metered.MigrateOptions{Schema: name})
		require.ErrorIs(t, err, budget.ErrArgument)
		_, err = metered.Validate(t.Context(), pool, name)
		require.ErrorIs(t, err, budget.ErrArgument)
		_, err = metered.GrantSQL(name, "app")
		require.ErrorIs(t, err, budget.ErrArgument)
	}
	for _, role := range []string{"", strings.Repeat("r", 64), "a\x00b"} {
		_, err := metered.GrantSQL("", role)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
}

// relations counts the tables of a schema.
func relations(t *testing.T, pool *pgxpool.Pool, schema string) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(),
		`select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1 and c.relkind = 'r'`, schema).Scan(&n))
	return n
}

func TestMigrate_SaysThatAnotherMigrationIsAtIt(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	other := pgtest.OpenWith(t, pgtest.Options{Empty: true}) // its lock is another database's
	for _, p := range []*pgxpool.Pool{pool, other} {
		tx, err := p.Begin(ctx)
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(ctx, "select pg_advisory_xact_lock($1)", schema.MigrationLock)
		require.NoError(t, err)
	}
	until, cancel := context.WithCancel(ctx)
	defer cancel()
	var told string
	_, err := metered.Migrate(until, pool, metered.MigrateOptions{OnWait: func(_ context.Context, what string) { told = what; cancel() }})
	require.ErrorIs(t, err, budget.ErrBusy)
	require.ErrorIs(t, err, context.Canceled)
	require.Contains(t, told, "another migration, which process ")
}

// Whatever the name of the schema and the search_path of the session, the schema is whole, and Go and SQL lock the same keys.
func TestSchema_OddNamesAndSearchPaths(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	all := []string{"select", "money_1", "metered", "metered_tx", "_", "schema"}
	some := [][]string{{"select"}, {"metered_tx"}, {"_", "schema"}} // other tests have the rest
	for i, path := range []string{`""`, `odd, pg_catalog`, `pg_temp, public`} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.OpenWith(t, pgtest.Options{Empty: true, Config: func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["search_path"] = path
			}})
			_, err := pool.Exec(t.Context(), `create schema odd;
				create function odd.now() returns pg_catalog.int4 language sql as 'select 1';
				create operator odd.= (leftarg = pg_catalog.text, rightarg = pg_catalog.text, function = pg_catalog.textne)`, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			for _, name := range pgtest.Size(some[i], all) {
				_, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{Schema: name})
				require.NoError(t, err, name)
				report, err := metered.Validate(t.Context(), pool, name)
				require.NoError(t, err, name)
				require.Empty(t, report.Differences, name)
				c, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: name}})
				require.NoError(t, err)
				var key, hold int64
				require.NoError(t, pool.QueryRow(t.Context(), `select "`+name+`"._scope_key('ä"\,'), "`+name+`"._lock_key('metered/hold/`+name+`', convert_to('t','UTF8') || '\x00' || convert_to('id','UTF8'))`).Scan(&key, &hold))
				require.Equal(t, c.Budget.LockKey(`ä"\,`), key)
				require.Equal(t, lockkey.Of("metered/hold/"+name, "t\x00id"), hold)
				out, err := metered.Do(t.Context(), c, metered.Command{ID: "1", Input: 1, Name: "n", Charges: []budget.Charge{{Scope: `ä"\,{}()null`, Amount: 1, Limits: []budget.Limit{budget.Lifetime(3)}}}},
					func(ctx context.Context, tx *metered.Tx) (int, error) {
						_, err := tx.Place(ctx, holds.Placement{ID: `i"\{},()`, TTL: time.Minute, Lines: []holds.Line{{Scope: `s"\{},() NULL`, Amount: 2}}}, nil)
						return 1, err
					})
				require.NoError(t, err, name)
				require.Len(t, out.Holds, 1)
			}
		})
	}
}

// apply runs the text as one query, as a migration tool does.
func apply(t *testing.T, pool *pgxpool.Pool, opts metered.SchemaSQLOptions) error {
	t.Helper()
	text, err := metered.SchemaSQL(opts)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), text, pgx.QueryExecModeSimpleProtocol)
	return err
}

func TestSchemaSQL_HasTheEffectOfMigrate(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, name := range []string{"metered", "money_1"} {
		pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
		require.NoError(t, apply(t, pool, metered.SchemaSQLOptions{Schema: name}))
		pgtest.Execute(t, pool, "drop function "+name+".keep_memory()")
		require.NoError(t, apply(t, pool, metered.SchemaSQLOptions{Schema: name, From: metered.SchemaVersion}))
		require.NoError(t, apply(t, pool, metered.SchemaSQLOptions{Schema: name, From: metered.SchemaVersion, DropPrevious: true}))
		report := pgtest.Migrate(t, pool, metered.MigrateOptions{Schema: name})
		require.Equal(t, metered.MigrateReport{From: metered.SchemaVersion, To: metered.SchemaVersion}, report)
	}
}

func TestSchemaSQL_MarksStatementsForTheTool(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	texts := make(map[string]string)
	for _, tool := range []string{"", "goose", "golang-migrate", "tern", "atlas"} {
		for from := range metered.SchemaVersion + 1 {
			var err error
			texts[tool], err = metered.SchemaSQL(metered.SchemaSQLOptions{From: from, Tool: tool})
			require.NoError(t, err)
			require.NotContains(t, strings.ReplaceAll(texts[tool], `{{"{{"}}`, ""), "{{", "tern takes it for a template")
		}
	}
	require.True(t, strings.HasPrefix(texts["goose"], "-- +goose Up\n"))
	require.Equal(t, strings.Count(texts["goose"], "$$"), 2*strings.Count(texts["goose"], "StatementEnd"))
	for _, opts := range []metered.SchemaSQLOptions{{From: -1}, {From: metered.SchemaVersion + 1}, {Tool: "flyway"}, {Schema: "A"}} {
		_, err := metered.SchemaSQL(opts)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
}

// Migrate refuses a schema that has another version than it says, and leaves it as it is.
func TestMigrate_RefusesASchemaOfAnotherVersionThanItSays(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, "create table public.said as table metered.schema_version")
	c := pgtest.NewClient(t, pool, metered.Config{})
	const rename, renameBack = "alter table metered.schema_version rename installed_at to applied_at;", "alter table metered.schema_version rename applied_at to installed_at"
	for _, test := range []struct{ what, change, want, back string }{
		{"unreleased 1", rename + "update metered.schema_version set version = 1", "of an unreleased build", renameBack},
		{"unreleased 2", rename + "insert into metered.schema_version values (1)", "of an unreleased build", renameBack},
		{"unreleased 3", rename + "insert into metered.schema_version values (1), (3)", "of an unreleased build", renameBack},
		{"emptied", "truncate metered.schema_version", "schema_version says no version", ""},
		{"set back", "update metered.schema_version set version = 0", "schema_version says no version", ""},
		{"far back", "update metered.schema_version set version = -1", "schema_version says no version", ""},
		{"misnamed", "alter table metered.schema_version rename version to edition", "schema_version says no version",
			"alter table metered.schema_version rename edition to version"},
		{"without it", "alter table metered.schema_version set schema public", "schema_version says no version",
			"alter table public.schema_version set schema metered"},
		{"without tables", "drop table metered.schema_version, metered.operations cascade", "schema_version says no version", ""},
	} {
		pgtest.Execute(t, pool, test.change)
		before := pgtest.Validate(t, pool)
		_, migrated := metered.Migrate(t.Context(), pool, metered.MigrateOptions{})
		_, dropped := metered.Migrate(t.Context(), pool, metered.MigrateOptions{DropPrevious: true})
		for call, err := range map[string]error{"Validate": before.Err(), "Migrate": migrated, "with DropPrevious": dropped, "Do": pgtest.Do(t, c, "op")} {
			require.ErrorIs(t, err, metered.ErrSchemaDiffers, "%s: %s", test.what, call)
			require.ErrorContains(t, err, test.want, "%s: %s", test.what, call)
		}
		require.Equal(t, before, pgtest.Validate(t, pool), test.what)
		if test.what == "without tables" { // it is the last
			break
		}
		pgtest.Execute(t, pool, test.back)
		pgtest.Execute(t, pool, "truncate metered.schema_version; insert into metered.schema_version table public.said")
	}
}

// The processes of this build go on, and start again, while the version after it is there.
func TestMigrate_MeetsANewerSchema(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, `insert into metered.schema_version (version) values (`+strconv.Itoa(metered.SchemaVersion+1)+`);
		create or replace function metered.clock() returns timestamptz language sql as 'select pg_catalog.clock_timestamp() -- anew';
		alter table metered.ledger add column more text; drop index metered.operations_at`)
	next := metered.SchemaReport{Version: metered.SchemaVersion + 1}
	require.Equal(t, next, pgtest.Validate(t, pool))
	require.NoError(t, pgtest.Validate(t, pool).Err())
	for _, drop := range []bool{false, true} {
		report := pgtest.Migrate(t, pool, metered.MigrateOptions{DropPrevious: drop})
		require.Equal(t, metered.MigrateReport{From: next.Version, To: next.Version}, report)
	}
	require.Equal(t, next, pgtest.Validate(t, pool))

	dropFunctions(t, pool, "lock_scopes")
	require.ErrorIs(t, pgtest.Validate(t, pool).Err(), metered.ErrSchemaVersion)
	_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{})
	require.ErrorIs(t, err, metered.ErrSchemaVersion)
	require.ErrorContains(t, err, "function lock_scopes(")
	require.Equal(t, "schema_version", metered.Code(err))

	pgtest.Execute(t, pool, `insert into metered.schema_version (version) values (`+strconv.Itoa(metered.SchemaVersion+2)+`)`)
	_, err = metered.Migrate(ctx, pool, metered.MigrateOptions{})
	require.ErrorIs(t, err, metered.ErrSchemaVersion)
	require.ErrorIs(t, pgtest.Validate(t, pool).Err(), metered.ErrSchemaVersion)
}

package metered_test

import (
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func execute(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}

// Each difference is named. Migrate repairs what functions are, and changes nothing where a table differs.
func TestValidate_NamesEachDifference(t *testing.T) {
	t.Parallel()
	pool := openFresh(t)
	for _, test := range []struct {
		change, back string // back is empty where Migrate repairs it
		want         string
	}{
		{"drop function metered.clock()", "", "function clock() is missing"},
		{"create or replace function metered.clock() returns timestamptz language sql volatile as 'select now()'", "", "function clock() differs: it is"},
		{"alter function metered.clock() security definer", "", "function clock() differs: it is"},
		{"alter function metered.clock() set search_path = public", "", "function clock() differs: it is"},
		{"alter function metered.clock() reset all; alter function metered.clock() immutable", "", "function clock() differs: it is"},
		{"grant execute on function metered.clock() to public", "", "function clock() can be executed by everybody"},
		{"alter table metered.ledger drop column next_due", "alter table metered.ledger add column next_due timestamptz", "column ledger.next_due is missing"},
		{"alter table metered.ledger alter column held drop not null", "alter table metered.ledger alter column held set not null",
			`column ledger.held differs: it is "bigint" and should be "bigint not null"`},
		{"alter table metered.tokens alter column used set default 1", "alter table metered.tokens alter column used set default 0",
			`column tokens.used differs: it is "integer not null default 1" and should be "integer not null default 0"`},
		{"alter index metered.holds_due rename to other", "alter index metered.other rename to holds_due", "index holds_due is missing"},
		{"drop index metered.operations_at; create index operations_at on metered.operations (at desc)",
			"drop index metered.operations_at; create index operations_at on metered.operations (at)", "index operations_at differs"},
		{"alter table metered.tokens drop constraint tokens_uses_check", "alter table metered.tokens add constraint tokens_uses_check check (uses >= 1)",
			"constraint tokens.tokens_uses_check is missing"},
		{"alter table metered.tokens drop constraint tokens_uses_check; alter table metered.tokens add constraint tokens_uses_check check (uses >= 1) not valid",
			"alter table metered.tokens validate constraint tokens_uses_check", "NOT VALID"},
		{"alter table metered.job_keys set unlogged", "alter table metered.job_keys set logged", "table job_keys differs"},
		{"alter domain metered.units add constraint small check (value < 10)", "alter domain metered.units drop constraint small", "type units differs"},
	} {
		execute(t, pool, test.change)
		found := validate(t, pool)
		require.ErrorIs(t, found.Err(), metered.ErrSchemaDiffers, test.change)
		require.ErrorContains(t, found.Err(), test.want, test.change)
		require.Equal(t, "schema_differs", metered.Code(found.Err()))
		report, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{})
		if test.back == "" {
			require.NoError(t, err, test.change)
			require.Equal(t, found.Differences, report.Repaired)
		} else {
			require.ErrorIs(t, err, metered.ErrSchemaDiffers, test.change)
			require.ErrorContains(t, err, test.want, test.change)
			require.Equal(t, found, validate(t, pool), "nothing was changed")
			execute(t, pool, test.back)
		}
		require.NoError(t, validate(t, pool).Err(), test.change)
	}
}

func TestValidate_WhatSomebodyAddedIsNoDifference(t *testing.T) {
	t.Parallel()
	pool := openFresh(t)
	execute(t, pool, `
		create table metered.mine (id int primary key);
		alter table metered.ledger add column mine text;
		create index mine_index on metered.ledger (mine);
		create function metered.clock(zone text) returns timestamptz language sql as 'select now()';
		create function metered.my_trigger() returns trigger language plpgsql as 'begin return null; end';
		create trigger mine after insert on metered.ledger for each row execute function metered.my_trigger();
		create view metered.my_view as select * from metered.ledger;
		create type metered.my_type as (a int);
		grant select on metered.tokens to public;
		comment on table metered.ledger is 'ours'`)
	require.Equal(t, metered.SchemaReport{Version: metered.SchemaVersion}, validate(t, pool))
	report := migrate(t, pool, metered.MigrateOptions{DropPrevious: true})
	require.Equal(t, metered.MigrateReport{From: metered.SchemaVersion, To: metered.SchemaVersion}, report)

	execute(t, pool, "drop function metered.clock()")
	migrate(t, pool, metered.MigrateOptions{})
	require.True(t, queryRow[bool](t, pool, "select has_function_privilege('public', 'metered.my_trigger()', 'execute')"), "it is not this library's")
	require.Equal(t, "ours", queryRow[string](t, pool, "select obj_description('metered.ledger'::regclass)"))
}

func TestValidate_WorksInATransactionAndForTheApplication(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	app := pgtest.AsRole(t, owner, metered.GrantSQL, "")
	require.NoError(t, validate(t, app).Err())
	tx, err := app.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "set local search_path = metered")
	require.NoError(t, err)
	require.NoError(t, validate(t, tx).Err())
	require.Equal(t, "metered", queryRow[string](t, tx, "show search_path"))
	require.NoError(t, tx.Rollback(t.Context()))
	conn, err := app.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	require.NoError(t, validate(t, conn).Err())

	stranger := pgtest.AsRole(t, owner, nil, "")
	_, err = metered.Validate(t.Context(), stranger, "")
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
	require.ErrorContains(t, err, "metered.GrantSQL")
	_, err = metered.Migrate(t.Context(), app, metered.MigrateOptions{})
	require.NoError(t, err, "there is nothing to do")
}

func TestValidate_SaysThatThereIsNoSchema(t *testing.T) {
	t.Parallel()
	report := validate(t, pgtest.OpenWith(t, pgtest.Options{Empty: true}))
	require.Zero(t, report.Version)
	require.NotEmpty(t, report.Differences)
	require.ErrorIs(t, report.Err(), metered.ErrNotMigrated)
	require.False(t, report.OK())
}

// The processes of this build go on, and start again, while the version after it is there.
func TestMigrate_MeetsANewerSchema(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := openFresh(t)
	execute(t, pool, `insert into metered.schema_version (version) values (`+strconv.Itoa(metered.SchemaVersion+1)+`);
		create or replace function metered.clock() returns timestamptz language sql as 'select pg_catalog.clock_timestamp() -- anew';
		alter table metered.ledger add column more text; drop index metered.operations_at`)
	next := metered.SchemaReport{Version: metered.SchemaVersion + 1}
	require.Equal(t, next, validate(t, pool))
	require.NoError(t, validate(t, pool).Err())
	for _, drop := range []bool{false, true} {
		report := migrate(t, pool, metered.MigrateOptions{DropPrevious: drop})
		require.Equal(t, metered.MigrateReport{From: next.Version, To: next.Version}, report)
	}
	require.Equal(t, next, validate(t, pool))

	dropFunctions(t, pool, "lock_scopes")
	require.ErrorIs(t, validate(t, pool).Err(), metered.ErrSchemaVersion)
	_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{})
	require.ErrorIs(t, err, metered.ErrSchemaVersion)
	require.ErrorContains(t, err, "function lock_scopes(")
	require.Equal(t, "schema_version", metered.Code(err))

	execute(t, pool, `insert into metered.schema_version (version) values (`+strconv.Itoa(metered.SchemaVersion+2)+`)`)
	_, err = metered.Migrate(ctx, pool, metered.MigrateOptions{})
	require.ErrorIs(t, err, metered.ErrSchemaVersion)
	require.ErrorIs(t, validate(t, pool).Err(), metered.ErrSchemaVersion)
}

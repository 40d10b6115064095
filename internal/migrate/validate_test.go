package migrate_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Validate names each difference. Migrate repairs functions and views, and changes nothing where a table differs: it names each
// difference of tables, which shows that each alone would stop it.
func TestValidate_NamesEachDifference(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	require.NoError(t, pgtest.Validate(t, pool).Err())
	tests := []struct {
		change, back string // back is empty where Migrate repairs it
		want         string
	}{
		{"drop function metered.keep_memory()", "", "function keep_memory() is missing"},
		{"create or replace function metered.clock() returns timestamptz language sql volatile as 'select now()'", "", "function clock() differs: it is"},
		{"alter function metered._scope_key(text) security definer", "", "function _scope_key(text) differs: it is"},
		{"alter function metered.usage_at set search_path = public", "", "function usage_at(text, timestamp with time zone[]) differs: it is"},
		{"alter function metered.revoke_tokens immutable", "", "function revoke_tokens(text, text, integer) differs: it is"},
		{"grant execute on function metered.lock_scopes to public", "", "function lock_scopes(text[], integer) can be executed by everybody"},
		{"alter table metered.ledger drop column anchor_at", "alter table metered.ledger add column anchor_at timestamptz", "column ledger.anchor_at is missing"},
		{"alter table metered.ledger alter column held drop not null", "alter table metered.ledger alter column held set not null",
			`column ledger.held differs: it is "bigint" and should be "bigint not null"`},
		{"alter table metered.tokens alter column used set default 1", "alter table metered.tokens alter column used set default 0",
			`column tokens.used differs: it is "integer not null default 1" and should be "integer not null default 0"`},
		{"alter index metered.holds_due rename to other", "alter index metered.other rename to holds_due", "index holds_due is missing"},
		{"drop index metered.operations_at; create index operations_at on metered.operations (at desc)",
			"drop index metered.operations_at; create index operations_at on metered.operations (at)", "index operations_at differs"},
		{"alter table metered.holds_horizon drop constraint holds_horizon_one_check", "alter table metered.holds_horizon add constraint holds_horizon_one_check check (one)",
			"constraint holds_horizon.holds_horizon_one_check is missing"},
		{"alter table metered.cell drop constraint cell_one_check; alter table metered.cell add constraint cell_one_check check (one) not valid",
			"alter table metered.cell validate constraint cell_one_check", "NOT VALID"},
		{"alter table metered.job_keys set unlogged", "alter table metered.job_keys set logged", "table job_keys differs"},
		{"alter domain metered.units add constraint small check (value < 10)", "alter domain metered.units drop constraint small", "type units differs"},
		{"drop view metered.tokens_words", "", "column tokens_words.used is missing"},
		{"drop view metered.scopes; create view metered.scopes as select 1 as scope", "", "column scopes.clock_repairs is missing"},
		{"alter view metered.statement owner to pg_monitor", "", "table statement has another owner"},
	}
	text := func(report metered.SchemaReport) (all string) {
		for _, d := range report.Differences {
			all += migrate.Difference(d).String() + "\n"
		}
		return all
	}
	for _, test := range tests {
		pgtest.Execute(t, pool, test.change)
	}
	found := pgtest.Validate(t, pool)
	require.ErrorIs(t, found.Err(), metered.ErrSchemaDiffers)
	require.ErrorContains(t, found.Err(), "column ledger.anchor_at is missing; ")
	require.Equal(t, "schema_differs", metered.Code(found.Err()))
	_, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{})
	require.ErrorIs(t, err, metered.ErrSchemaDiffers)
	for _, test := range tests {
		require.Contains(t, text(found), test.want, test.change)
		if test.back != "" {
			require.ErrorContains(t, err, test.want, test.change)
		}
	}
	require.Equal(t, found, pgtest.Validate(t, pool), "nothing was changed")
	require.NotEmpty(t, unusable(t, pool, schema.Current().Read))
	require.Equal(t, unusable(t, pool, schema.Current().Read), unusable(t, pool, schema.Current().ReadUsable), "a client's look sees all that it judges")

	for _, test := range tests {
		pgtest.Execute(t, pool, test.back)
	}
	found = pgtest.Validate(t, pool)
	for _, test := range tests {
		if test.back == "" {
			require.Contains(t, text(found), test.want, test.change)
		} else {
			require.NotContains(t, text(found), test.want, test.change)
		}
	}
	report := pgtest.Migrate(t, pool, metered.MigrateOptions{})
	require.Equal(t, found.Differences, report.Repaired)
	require.NoError(t, pgtest.Validate(t, pool).Err())
}

// unusable are the differences for which a client refuses its calls.
func unusable(t *testing.T, pool *pgxpool.Pool, read func(context.Context, schema.DB, schema.Name) (schema.Catalog, error)) (all []string) {
	t.Helper()
	n, err := schema.Parse("")
	require.NoError(t, err)
	c, err := read(t.Context(), pool, n)
	require.NoError(t, err)
	for _, d := range c.Unusable() {
		all = append(all, d.Object.Key()+" "+string(d.Problem))
	}
	return all
}

func TestValidate_AnAddedObjectIsNoDifference(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, `
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
	require.Equal(t, metered.SchemaReport{Version: metered.SchemaVersion}, pgtest.Validate(t, pool))
	report := pgtest.Migrate(t, pool, metered.MigrateOptions{DropPrevious: true})
	require.Equal(t, metered.MigrateReport{From: metered.SchemaVersion, To: metered.SchemaVersion}, report)

	pgtest.Execute(t, pool, "drop function metered.keep_memory()")
	pgtest.Migrate(t, pool, metered.MigrateOptions{})
	require.True(t, pgtest.Value[bool](t, pool, "select has_function_privilege('public', 'metered.my_trigger()', 'execute')"), "it is not this library's")
	require.Equal(t, "ours", pgtest.Value[string](t, pool, "select obj_description('metered.ledger'::regclass)"))
}

func TestValidate_WorksInATransactionAndForTheApplication(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner := pgtest.Open(t)
	app := pgtest.AsRole(t, owner, metered.GrantSQL, "")
	require.NoError(t, pgtest.Validate(t, app).Err())
	tx, err := app.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "set local search_path = metered")
	require.NoError(t, err)
	require.NoError(t, pgtest.Validate(t, tx).Err())
	require.Equal(t, "metered", pgtest.Value[string](t, tx, "show search_path"))
	require.NoError(t, tx.Rollback(t.Context()))
	conn, err := app.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	require.NoError(t, pgtest.Validate(t, conn).Err())

	stranger := pgtest.AsRole(t, owner, nil, "")
	_, err = metered.Validate(t.Context(), stranger, "")
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
	require.ErrorContains(t, err, "metered.GrantSQL")
	_, err = metered.Migrate(t.Context(), app, metered.MigrateOptions{})
	require.NoError(t, err, "there is nothing to do")
}

func TestValidate_SaysThatThereIsNoSchema(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	report := pgtest.Validate(t, pgtest.OpenWith(t, pgtest.Options{Empty: true}))
	require.Zero(t, report.Version)
	require.NotEmpty(t, report.Differences)
	require.ErrorIs(t, report.Err(), budget.ErrNotMigrated)
	require.NotEmpty(t, report.Differences)
}

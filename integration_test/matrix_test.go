package integration_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// way is one way to reach the database.
type way struct {
	open   func(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool
	schema string
	sql    bool              // transactions are those of database/sql
	begin  string            // runs once the clients have found their schema whole
	fails  map[string]string // calls that fail, with a part of the error. All others must work
	works  []string          // if not empty, all calls but these fail, since Postgres refuses the role
}

func inMode(mode pgx.QueryExecMode, settings ...map[string]string) way {
	return way{open: func(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
		return pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = mode
			for _, all := range settings {
				maps.Copy(c.ConnConfig.RuntimeParams, all)
			}
		})
	}}
}

// tenants is a table of the caller's, whose rows only their tenant sees.
const tenants = `
create table notes (tenant text not null, body text not null);
alter table notes enable row level security;
create policy own on notes using (tenant = current_setting('app.tenant', true));`

// withoutFeed takes the feed's tables away from the functions of the schema.
const withoutFeed = `
do $$
declare
    name text;
begin
    for name in select c.relname from pg_class c
        where c.relnamespace = 'metered'::regnamespace and c.relkind in ('r', 'v') and c.relname ~ '^feed'
    loop
        execute format('alter table metered.%I rename to %I', name, 'no_' || name);
    end loop;
end $$`

func ways() map[string]way {
	notGranted := map[string]string{}
	for _, call := range []string{"metered.Migrate", "metered.Migrate, a new schema", "Ledger.Purge", "Ledger.RepairClock", "maintain.Run",
		"Notary.Notarize", "Register.Export", "Register.Pseudonymize",
		"Notary.Verify", "Notary.Receipt"} {
		notGranted[call] = "42501" // Postgres refuses the role
	}
	anybodys := slices.Clip([]string{"metered.Validate", "replica.CommitLSN", "replica.ReadLSN", "Pool.Close", "Pool.Spends", "Batcher.Close"})
	all := map[string]way{
		"an empty search_path": {fails: map[string]string{"metered.Migrate": "migrate river: "}, open: func(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
			return pgtest.Reopen(t, owner, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = "" })
		}},
		"through database/sql": {sql: true, open: func(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
			return pgtest.Reopen(t, owner, func(*pgxpool.Config) {})
		}},
		"as maintenance": {open: func(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
			return pgtest.AsRole(t, owner, metered.GrantMaintenanceSQL, "")
		}, works: append(anybodys, "Ledger.Entries", "Ledger.ClockAhead", "Ledger.Purge", "Ledger.RepairClock", "Ledger.NumberFeed", "Ledger.FeedConsumers",
			"Ledger.DropFeedConsumer", "maintain.Run")},
		"as reporting": {open: func(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
			return pgtest.AsRole(t, owner, metered.GrantReportingSQL, "")
		}, works: append(anybodys, "Ledger.Entries", "Ledger.ClockAhead", "Ledger.Entries, by note", "Ledger.Resources", "Ledger.Check", "Ledger.Usage",
			"Ledger.UsageBetween", "Ledger.Series", "Ledger.WhatIf", "Ledger.Verify", "Ledger.Feed", "Ledger.FeedConsumers", "Book.Due", "Book.History", "Book.Get", "Book.List", "Book.Claimed",
			"wallet.Book.Balance", "wallet.Book.Statement", "Enqueuer.Explain", "Pool.History", "Carver.Get", "replica.ReadAt",
			"Notary.Verify", "Notary.Receipt", "leases.Sweep")}, // which finds nothing to write
		"as the application": {fails: notGranted, open: func(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
			return pgtest.AsRole(t, owner, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), pgtest.RiverGrantSQL+"; grant select, insert on notes to $role;")
		}},
	}
	const strange = "SQL dates, backslashes in strings"
	feed := inMode(pgx.QueryExecModeExec, unusual[strange])
	feed.begin, feed.fails = withoutFeed, map[string]string{"metered.Migrate": "column feed.no is missing"}
	for _, call := range []string{"Ledger.NumberFeed", "Ledger.Feed", "Ledger.ConsumeFeed", "Ledger.RunFeed", "Ledger.FeedConsumers", "Ledger.DropFeedConsumer",
		"Ledger.Purge", "Register.Export", "Register.Pseudonymize"} {
		feed.fails[call] = "42P01" // undefined table
	}
	all["without the feed's tables, in mode exec, "+strange] = feed
	for _, level := range []string{"repeatable read", "serializable"} {
		at := inMode(pgx.QueryExecModeCacheStatement, map[string]string{"default_transaction_isolation": level})
		at.fails = map[string]string{"metered.OpenTx": "is not READ COMMITTED", "sqlmetered.DoTx": "is not READ COMMITTED",
			"Register.Pseudonymize": "must be read committed"}
		if level == "serializable" {
			at.schema = "other"
			level += ", with another schema name"
		}
		all["at "+level] = at
	}
	for _, mode := range modes {
		all["in mode "+mode.String()] = inMode(mode)
		for name, settings := range unusual {
			if mode == pgx.QueryExecModeSimpleProtocol && settings["standard_conforming_strings"] == "off" {
				continue // pgx refuses it
			}
			all["in mode "+mode.String()+", "+name] = inMode(mode, settings)
		}
	}
	if !pgtest.Long { // each mode once, the strictest level, and each setting in a mode that gets text: the others are those of PgBouncer's test
		maps.DeleteFunc(all, func(name string, _ way) bool {
			mode, _ := strings.CutPrefix(name, "in mode ")
			return name == "at repeatable read" || mode != name && !slices.Contains(sampled, mode) || !pgtest.CI && slices.Contains(inCI, name)
		})
	}
	return all
}

// sampled are the modes and settings that are tried by default. All ways that name none are in the mode "cache statement".
// The way without the feed's tables is in the mode "exec", with settings.
var sampled = []string{"cache describe", "describe exec", "simple protocol, German dates"}

// inCI are ways that only CI goes: other tests are about each of them.
var inCI = []string{"an empty search_path", "in mode cache describe", "in mode describe exec", "as maintenance", "as reporting"}

// unusual are settings that a server, a database or a role may have.
var unusual = map[string]map[string]string{
	"German dates": {
		"DateStyle": "German", "IntervalStyle": "sql_standard", "TimeZone": "Asia/Kolkata", "bytea_output": "escape", "extra_float_digits": "-15",
	},
	"Postgres dates, no null in an array": {"DateStyle": "Postgres, MDY", "IntervalStyle": "postgres_verbose", "TimeZone": "America/St_Johns", "array_nulls": "off"},
	"SQL dates, backslashes in strings": {"DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601", "standard_conforming_strings": "off", "backslash_quote": "off",
		"escape_string_warning": "off"},
}

// Each public call works each way: in each mode of pgx, through database/sql, in transactions of each isolation level, as the role of an application
// with row-level security on a table of its own, in a schema of another name, and without a search_path. The roles of maintenance and of reporting
// make some calls, and are refused all others. No call but the feed's needs the feed's tables. TestPgBouncer_EveryCallInEveryMode has the ways through PgBouncer.
func TestMatrix_EveryCallEachWay(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	all := ways()
	if !pgtest.Long {
		require.Len(t, all, pgtest.Sizes(10-len(inCI), 10, 0))
	}
	for name, w := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			owner := pgtest.Open(t)
			_, err := owner.Exec(t.Context(), tenants, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			if w.schema != "" {
				_, err := metered.Migrate(t.Context(), owner, metered.MigrateOptions{Schema: w.schema})
				require.NoError(t, err)
			}
			client := func(pool *pgxpool.Pool) *metered.Client {
				queue, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Schema: "public", Plugins: []rivertype.Plugin{jobs.Plugin()}})
				require.NoError(t, err)
				c, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: w.schema}, River: queue})
				require.NoError(t, err)
				return c
			}
			pool := w.open(t, owner)
			c := client(pool)
			b := &behind{t: t, direct: owner, d: client(owner), pool: pool, c: c, schema: w.schema, sql: w.sql}
			if w.begin != "" {
				for _, client := range []*metered.Client{b.d, b.c} {
					_, err := client.Lookup(t.Context(), owner, "", "none")
					require.ErrorIs(t, err, metered.ErrUnknownOperation)
				}
				pgtest.Execute(t, owner, w.begin)
			}
			failed := everyCallBy(b, 1)
			if w.works != nil {
				var can []string
				for call := range b.called {
					if failed[call] == nil {
						can = append(can, call)
					} else {
						require.ErrorContains(t, failed[call], "42501")
					}
				}
				require.ElementsMatch(t, w.works, can)
				t.Logf("cell: %s: %d calls", name, len(can))
				return
			}
			for call, text := range w.fails {
				require.ErrorContains(t, failed[call], text, call)
				delete(failed, call)
			}
			require.Empty(t, failed)
			tenantWrites(t, owner, pool, c)
			t.Logf("cell: %s: all calls but %d", name, len(w.fails))
		})
	}
}

// tenantWrites makes a command that writes a row under row-level security, and one that would write another tenant's.
func tenantWrites(t *testing.T, owner, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	write := func(id, tenant, as string) error {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: id, Input: 1, Charges: []budget.Charge{{Scope: "notes", Amount: 1}}},
			func(ctx context.Context, tx *metered.Tx) (any, error) {
				_, err := tx.Exec(ctx, "select pg_catalog.set_config('app.tenant', $1, true)", as)
				return nil, errors.Join(err, second(tx.Exec(ctx, "insert into public.notes values ($1, 'hello')", tenant)))
			})
		return err
	}
	require.NoError(t, write("own", "ann", "ann"))
	limited := pgtest.Value[bool](t, pool, "select not (select rolsuper from pg_roles where rolname = current_user)")
	if limited {
		require.ErrorContains(t, write("another's", "bob", "ann"), "42501")
		require.Equal(t, 1, pgtest.Value[int](t, owner, "select count(*)::int from metered.ledger where scope = 'notes'"), "nothing is charged then")
	}
}

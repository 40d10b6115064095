package metered_test

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// earlierVersions runs f for each version before this one.
func earlierVersions(t *testing.T, f func(t *testing.T, version int)) {
	for version := 1; version < metered.SchemaVersion; version++ {
		t.Run(fmt.Sprintf("from version %d", version), func(t *testing.T) {
			t.Parallel()
			f(t, version)
		})
	}
}

// requireSame asserts that two databases have the same schema, with nothing left over.
func requireSame(t *testing.T, a, b schema.DB) {
	t.Helper()
	n, err := schema.Parse("")
	require.NoError(t, err)
	var lines [2][]string
	for i, db := range []schema.DB{a, b} {
		c, err := schema.ReadCatalog(t.Context(), db, n)
		require.NoError(t, err)
		lines[i] = strings.Split(c.Text(), "\n")
	}
	require.Empty(t, slices.DeleteFunc(slices.Clone(lines[0]), func(l string) bool { return slices.Contains(lines[1], l) }))
	require.Empty(t, slices.DeleteFunc(slices.Clone(lines[1]), func(l string) bool { return slices.Contains(lines[0], l) }))
}

// openFresh is pgtest.Open with a schema that no earlier version has left anything in, whatever the
// other tests run on.
func openFresh(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	migrate(t, pool, metered.MigrateOptions{River: true})
	return pool
}

func validate(t *testing.T, db schema.DB) metered.SchemaReport {
	t.Helper()
	report, err := metered.Validate(t.Context(), db, "")
	require.NoError(t, err)
	return report
}

// columnsSQL is what the catalog does not say: the order of columns.
const columnsSQL = `
select string_agg(c.relname || '.' || a.attname, ' ' order by c.relname, a.attnum)
from pg_class c join pg_attribute a on a.attrelid = c.oid
where c.relnamespace = 'metered'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped`

func TestMigrate_MakesOfAnEarlierVersionWhatAFreshOneIs(t *testing.T) {
	t.Parallel()
	fresh := openFresh(t)
	require.NoError(t, validate(t, fresh).Err())
	earlierVersions(t, func(t *testing.T, version int) {
		pool := pgtest.OpenVersion(t, version)
		before := validate(t, pool)
		require.Equal(t, version, before.Version)
		require.ErrorIs(t, before.Err(), metered.ErrNotMigrated)

		report := migrate(t, pool, metered.MigrateOptions{})
		require.Equal(t, version, report.From)
		require.Equal(t, metered.SchemaVersion, report.To)
		require.Empty(t, report.Repaired)
		after := validate(t, pool)
		require.NoError(t, after.Err())
		require.Equal(t, report.Previous, after.Previous)
		if version == metered.SchemaVersion-1 {
			require.ElementsMatch(t, schema.Previous(), report.Previous, "what that build calls stays")
			require.Empty(t, report.Dropped)
		}
		require.Equal(t, queryRow[string](t, fresh, columnsSQL), queryRow[string](t, pool, columnsSQL))

		again := migrate(t, pool, metered.MigrateOptions{})
		require.Equal(t, metered.MigrateReport{From: metered.SchemaVersion, To: metered.SchemaVersion, Previous: report.Previous}, again)
		last := migrate(t, pool, metered.MigrateOptions{DropPrevious: true})
		require.Equal(t, report.Previous, last.Dropped)
		require.Empty(t, last.Previous)
		require.NoError(t, validate(t, pool).Err())
		requireSame(t, fresh, pool)
	})
}

func TestMigrate_CanDropWhatThePreviousBuildCallsAtOnce(t *testing.T) {
	t.Parallel()
	fresh := openFresh(t)
	earlierVersions(t, func(t *testing.T, version int) {
		pool := pgtest.OpenVersion(t, version)
		migrate(t, pool, metered.MigrateOptions{DropPrevious: true})
		requireSame(t, fresh, pool)
	})
}

// rowsSQL is all that is in a table, column by column.
func rowsOf(t *testing.T, pool *pgxpool.Pool, table string, columns []string) string {
	t.Helper()
	cols := strings.Join(columns, ", ")
	return queryRow[string](t, pool, fmt.Sprintf(`select coalesce(json_agg(r order by r::text), '[]')::text from (select %s from metered.%s) r`, cols, table))
}

func TestMigrate_LosesNothing(t *testing.T) {
	t.Parallel()
	earlierVersions(t, func(t *testing.T, version int) {
		pool := pgtest.OpenVersion(t, version)
		rows, err := pool.Query(t.Context(), `select c.relname::text, array_agg(quote_ident(a.attname) order by a.attnum)
			from pg_class c join pg_attribute a on a.attrelid = c.oid
			where c.relnamespace = 'metered'::regnamespace and c.relkind = 'r' and a.attnum > 0 and c.relname <> 'schema_version' group by 1`)
		require.NoError(t, err)
		tables := make(map[string][]string)
		var table string
		var columns []string
		_, err = pgx.ForEachRow(rows, []any{&table, &columns}, func() error { tables[table] = append([]string(nil), columns...); return nil })
		require.NoError(t, err)
		before := make(map[string]string)
		for table, columns := range tables {
			before[table] = rowsOf(t, pool, table, columns)
			require.NotEqual(t, "[]", before[table], "there are rows in %s", table)
		}
		migrate(t, pool, metered.MigrateOptions{})
		for table, columns := range tables {
			require.Equal(t, before[table], rowsOf(t, pool, table, columns), table)
		}
	})
}

// What was begun with the build before is gone on with: the data is of testdata/version1_data.sql and version2_data.sql.
func TestMigrate_WhatWasThereIsUsable(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	earlierVersions(t, func(t *testing.T, version int) {
		pool := pgtest.OpenVersion(t, version)
		migrate(t, pool, metered.MigrateOptions{River: true})
		pgtest.SetClock(t, pool, noon)
		_, err := pool.Exec(t.Context(), `create table uploads (name text primary key)`)
		require.NoError(t, err)
		c := newClient(t, pool, metered.Config{SecretKey: secretKey, OnThreshold: func(context.Context, pgx.Tx, budget.Crossing) error { return nil }})
		if version > 1 {
			useSessions(t, pool, c)
			useWallets(t, pool, c)
			useLeases(t, pool, c)
			useThresholds(t, pool, c)
		}
		useLedger(t, pool, c)
		useHolds(t, pool, c, min(version, 2))
		useTokensAndJobs(t, pool, c)
		useOperations(t, pool, c)
		report, err := c.Budget.Verify(t.Context(), pool, budget.VerifyOptions{})
		require.NoError(t, err)
		require.True(t, report.OK(), report.Differences)

		ctx := t.Context()
		_, err = c.Budget.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Second})
		require.NoError(t, err)
		_, err = c.Holds.Purge(ctx, pool, holds.PurgeOptions{OlderThan: time.Second})
		require.NoError(t, err)
		_, err = c.PurgeOperations(ctx, pool, metered.PurgeOptions{OlderThan: time.Second})
		require.NoError(t, err)
		report, err = c.Budget.Verify(ctx, pool, budget.VerifyOptions{})
		require.NoError(t, err)
		require.True(t, report.OK(), report.Differences)
	})
}

func useLedger(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	usage := func(scope string, window time.Duration) budget.Usage {
		t.Helper()
		u, err := c.Budget.Usage(ctx, pool, budget.Query{Scope: scope, Window: window})
		require.NoError(t, err)
		return u[0]
	}
	// 1 + … + 40, two commands of 7, two refunds and a credit.
	require.Equal(t, int64(820+14-13-100), usage("org/acme", 0).Used)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Refund(ctx, tx, budget.Refund{Scope: "org/acme", Seq: 30, Amount: 21})
		require.ErrorIs(t, err, budget.ErrRefundExceeds)
		_, err = c.Budget.Refund(ctx, tx, budget.Refund{Scope: "org/acme", Seq: 30, Amount: 20})
		require.NoError(t, err)
		_, err = c.Budget.Refund(ctx, tx, budget.Refund{Scope: "org/old", Seq: 2, Amount: 1})
		require.ErrorIs(t, err, budget.ErrEntryPurged)
		_, err = c.Budget.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5000, Limits: []budget.Limit{budget.Lifetime(5000)}})
		require.ErrorIs(t, err, budget.ErrExceeded)
		receipt, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 9, Limits: []budget.Limit{budget.Lifetime(5000)}})
		require.NoError(t, err)
		require.Equal(t, int64(47), receipt.Entries[0].Seq)
		_, err = c.Budget.Charge(ctx, tx, charge("org/clock", 1, 100), charge("ip/192.0.2.1", 1, 1))
		return err
	}))
	require.Equal(t, int64(820+14-13-100-20+9), usage("org/acme", 0).Used)
	_, err := c.Budget.Check(ctx, pool, budget.Charge{Scope: "org/old", Amount: 1, Limits: []budget.Limit{{Max: 100, Window: 60 * 24 * time.Hour}}})
	require.ErrorIs(t, err, budget.ErrWindowPurged)
}

// holdOf is a hold, which is what its history says.
func holdOf(t *testing.T, pool *pgxpool.Pool, c *metered.Client, id string) holds.Hold {
	t.Helper()
	h, err := c.Holds.Get(t.Context(), pool, "acme", id, "")
	require.NoError(t, err)
	history, err := c.Holds.History(t.Context(), pool, "acme", id, "")
	require.NoError(t, err)
	rebuilt, err := holds.Rebuild(history)
	require.NoError(t, err)
	rebuilt.Now = h.Now
	require.Equal(t, h, rebuilt)
	return h
}

func useHolds(t *testing.T, pool *pgxpool.Pool, c *metered.Client, due int) {
	t.Helper()
	ctx := t.Context()
	state := func(id string) holds.Hold { t.Helper(); return holdOf(t, pool, c, id) }
	for id, want := range map[string]holds.State{
		"swept": holds.Expired, "open": holds.Held, "captured": holds.Captured, "partly": holds.Held,
		"released": holds.Released, "refunded": holds.Returned, "of plain": holds.Held,
	} {
		require.Equal(t, want, state(id).State, id)
	}
	late, err := c.Holds.Get(ctx, pool, "acme", "due", "")
	require.NoError(t, err)
	require.Equal(t, holds.Expired, late.State, "whether it was swept or not")
	// room/1 has 50: 5 captured, 4 of partly captured and 2 held, 2 held by open, and 4 of the one that is due, which are free.
	line := func(n int64) []holds.Line {
		return []holds.Line{{Scope: "room/1", Amount: n, Limits: []budget.Limit{budget.Lifetime(50)}}}
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Holds.Place(ctx, tx, holds.Request{Tenant: "acme", ID: "too many", Lines: line(38), TTL: time.Minute})
		require.ErrorIs(t, err, budget.ErrExceeded)
		_, err = c.Holds.Place(ctx, tx, holds.Request{Tenant: "acme", ID: "new", Lines: line(37), TTL: time.Minute})
		require.NoError(t, err)
		_, err = c.Holds.Capture(ctx, tx, holds.Capture{Tenant: "acme", IDs: []string{"open", "partly", "of plain"}, All: true})
		require.NoError(t, err)
		_, err = c.Holds.Refund(ctx, tx, holds.Refund{Tenant: "acme", IDs: []string{"captured"}, All: true})
		require.NoError(t, err)
		_, err = c.Holds.Release(ctx, tx, holds.Release{Tenant: "acme", IDs: []string{"new"}})
		require.NoError(t, err)
		// Placed once by the build before, and the same request still.
		_, err = c.Holds.Place(ctx, tx, holds.Request{ID: "019bdb46-aa00-7001-8000-000000000001", Lines: line(1), TTL: time.Minute})
		require.Error(t, err)
		ann := holds.Claim{Tenant: "acme", Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann", TTL: time.Hour}
		again, err := c.Holds.Claim(ctx, tx, ann)
		require.NoError(t, err)
		require.False(t, again.Created)
		ann.Holder = "eve"
		_, err = c.Holds.Claim(ctx, tx, ann)
		require.ErrorIs(t, err, holds.ErrTaken)
		ann.Key.Value = "bob"
		_, err = c.Holds.Claim(ctx, tx, ann)
		require.ErrorIs(t, err, holds.ErrTaken)
		return nil
	}))
	report, err := c.Holds.Sweep(ctx, pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, due, report.Expired, "the one that is due, and since version 2 a session")
}

func useTokensAndJobs(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	text := func(label string) string {
		secret, err := c.Secret("acme", "data", label)
		require.NoError(t, err)
		token, err := c.Tokens.Token(secret)
		require.NoError(t, err)
		return token.Reveal()
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for subject, uses := range map[string]int{"live": 1, "thrice": 2, "sole": 1, "spent": 0, "expired": 0, "revoked": 0} {
			label := subject
			if subject == "sole" {
				label = "sole again"
			}
			for i := range uses + 1 {
				_, err := c.Tokens.Consume(ctx, tx, "upload", subject, text(label))
				if i < uses {
					require.NoError(t, err, subject)
				} else {
					require.ErrorIs(t, err, tokens.ErrInvalid, subject)
				}
			}
		}
		job, err := c.Jobs.Enqueue(ctx, tx, process{"kept"}, &jobs.Options{Key: "kept", Tenant: "acme"})
		require.NoError(t, err)
		require.False(t, job.Created)
		_, err = c.Jobs.Enqueue(ctx, tx, process{"other"}, &jobs.Options{Key: "kept", Tenant: "acme"})
		require.ErrorIs(t, err, jobs.ErrConflict)
		return nil
	}))
}

func useOperations(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	for i, id := range []string{"plain", "019ca92b-6780-7003-8000-000000000003"} {
		cmd := metered.Command{ID: id, Namespace: "acme", Name: "upload", Input: map[string]int{"n": i},
			Charges: []budget.Charge{charge("org/acme", 7, 1000)}, Sticky: []budget.Charge{charge("tries/ann", 1, 100)}}
		out, err := metered.Do(ctx, c, cmd, mustNotRun(t))
		require.NoError(t, err)
		require.True(t, out.Replayed)
		require.Equal(t, id, out.Result.Name)
		require.Equal(t, int64(7), out.Receipt.Entries[0].Amount)
		require.Len(t, out.Holds, 2)
		require.Equal(t, "of "+id, out.Holds[0].ID)
		cmd.Input = "another"
		_, err = metered.Do(ctx, c, cmd, mustNotRun(t))
		require.ErrorIs(t, err, metered.ErrConflict)
	}
	// Its record was purged, with all that are older.
	_, err := metered.Do[any](ctx, c, metered.Command{ID: "019bdb46-aa00-7002-8000-000000000002", Namespace: "acme"}, nil)
	require.ErrorIs(t, err, metered.ErrRetired)
}

// grantedBy renders what the build of a version granted to one of its roles.
func grantedBy(t *testing.T, version int, role string) func(string, string) (string, error) {
	return func(_, name string) (string, error) {
		var mine strings.Builder
		for line := range strings.Lines(pgtest.VersionSQL(t, version, "_grants")) {
			if strings.Contains(line, "$"+role) {
				mine.WriteString(strings.ReplaceAll(line, "$"+role, pgx.Identifier{name}.Sanitize()))
			}
		}
		return mine.String(), nil
	}
}

// What was missing does not cost a role its rights.
func TestMigrate_GrantsWhatItCreatesAgain(t *testing.T) {
	t.Parallel()
	earlierVersions(t, func(t *testing.T, version int) {
		pool := pgtest.OpenVersion(t, version)
		app := queryRow[string](t, pgtest.AsRole(t, pool, grantedBy(t, version, "app"), ""), "select current_user::text")
		for _, name := range []string{"sweep_holds", "place"} {
			dropFunctions(t, pool, name)
			migrate(t, pool, metered.MigrateOptions{DropPrevious: true})
			other := queryRow[string](t, pgtest.AsRole(t, pool, metered.GrantSQL, ""), "select current_user::text")
			require.Equal(t, rightsOf(t, pool, other), rightsOf(t, pool, app))
		}
	})
}

// The roles of the build before need no new grants, and get no more than they had.
func TestMigrate_RolesCanDoWhatTheyCould(t *testing.T) {
	t.Parallel()
	earlierVersions(t, func(t *testing.T, version int) {
		ctx := t.Context()
		pool := pgtest.OpenVersion(t, version)
		app := pgtest.AsRole(t, pool, grantedBy(t, version, "app"), "")
		keeper := pgtest.AsRole(t, pool, grantedBy(t, version, "keeper"), "")
		reader := pgtest.AsRole(t, pool, nil, `grant usage on schema metered to $role; grant execute on function metered.usage to $role;
			grant select on metered.schema_version to $role`)
		roleOf := func(p *pgxpool.Pool) string { return queryRow[string](t, p, "select current_user::text") }

		migrate(t, pool, metered.MigrateOptions{River: true})
		_, err := pool.Exec(ctx, strings.ReplaceAll(riverGrantSQL, "$role", roleOf(app)), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		for _, dropped := range []bool{false, true} {
			migrate(t, pool, metered.MigrateOptions{DropPrevious: dropped})
			client, err := river.NewClient(riverpgxv5.New(app), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
			require.NoError(t, err)
			c, err := metered.New(app, metered.Config{River: client})
			require.NoError(t, err)
			if dropped {
				everyCall(t, app, c)
			}
			_, err = c.Budget.Purge(ctx, app, budget.PurgeOptions{OlderThan: time.Hour})
			require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))

			c, err = metered.New(keeper, metered.Config{})
			require.NoError(t, err)
			_, err = c.Budget.Purge(ctx, keeper, budget.PurgeOptions{OlderThan: time.Hour})
			require.NoError(t, err)
			_, err = c.Budget.Check(ctx, keeper, charge("s", 1, 1))
			require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))

			_, err = c.Budget.Usage(ctx, reader, budget.Query{Scope: "s"})
			require.NoError(t, err)
			_, err = c.Budget.Check(ctx, reader, charge("s", 1, 1))
			require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
		}
		// It is no more than GrantSQL would give.
		for _, set := range []struct {
			pool   *pgxpool.Pool
			render func(string, string) (string, error)
		}{{app, metered.GrantSQL}, {keeper, metered.GrantMaintenanceSQL}} {
			other := pgtest.AsRole(t, pool, set.render, "")
			require.Equal(t, rightsOf(t, pool, roleOf(other)), rightsOf(t, pool, roleOf(set.pool)))
		}
	})
}

// rightsOf are what a role may do in the schema.
func rightsOf(t *testing.T, pool *pgxpool.Pool, role string) string {
	t.Helper()
	return queryRow[string](t, pool, `select string_agg(what, chr(10) order by what) from (
		select 'execute ' || p.oid::regprocedure as what from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and has_function_privilege('`+role+`', p.oid, 'execute')
		union all
		select x || ' ' || c.oid::regclass from pg_class c, unnest(array['select', 'insert', 'update', 'delete', 'truncate']) x
		where c.relnamespace = 'metered'::regnamespace and c.relkind = 'r' and has_table_privilege('`+role+`', c.oid, x)) r`)
}

// A member of the owner upgrades for it, and whoever is neither is told so.
func TestMigrate_EverythingBelongsToTheOwnerOfTheTables(t *testing.T) {
	t.Parallel()
	earlierVersions(t, func(t *testing.T, version int) {
		ctx := t.Context()
		pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
		owner := pgtest.AsRole(t, pool, nil, "grant create on database "+pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize()+" to $role")
		_, err := owner.Exec(ctx, pgtest.VersionSQL(t, version, ""), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		role := pgtest.AsRole(t, pool, nil, "grant usage on schema metered to $role; grant select on metered.schema_version to $role")
		name := queryRow[string](t, role, "select current_user::text")
		role.Close()
		stranger := pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) {
			cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "set session authorization "+name)
				return err
			}
		})
		_, err = metered.Migrate(ctx, stranger, metered.MigrateOptions{})
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
		require.ErrorContains(t, err, "the schema belongs to the role")

		migrate(t, pool, metered.MigrateOptions{}) // as a superuser
		require.NoError(t, validate(t, pool).Err())
		migrate(t, stranger, metered.MigrateOptions{}) // there is nothing left to do
		_, err = pool.Exec(ctx, "alter function metered.clock() owner to current_user")
		require.NoError(t, err)
		require.ErrorContains(t, validate(t, pool).Err(), "function clock() has another owner")
		report := migrate(t, pool, metered.MigrateOptions{})
		require.Len(t, report.Repaired, 1)
		require.NoError(t, validate(t, pool).Err())
	})
}

// program finds a client program of Postgres's beside the server's.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not here", name)
	}
	return path
}

// restored is a database made from a dump of pool's, with pg_dump's options.
func restored(t *testing.T, pool *pgxpool.Pool, options ...string) *pgxpool.Pool {
	t.Helper()
	other := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	dump := exec.Command(program(t, "pg_dump"), append(options, "--schema=metered", "-d", connString(pool))...)
	var errs bytes.Buffer
	dump.Stderr = &errs
	text, err := dump.Output()
	if strings.Contains(errs.String(), "server version mismatch") {
		t.Skip("pg_dump is older than the server")
	}
	require.NoError(t, err, errs.String())
	load := exec.Command(program(t, "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-d", connString(other))
	load.Stdin = bytes.NewReader(text)
	out, err := load.CombinedOutput()
	require.NoError(t, err, string(out))
	return other
}

// connString names the pool's database for a program that may not know all of pgx's settings.
func connString(pool *pgxpool.Pool) string {
	c := pool.Config().ConnConfig
	return fmt.Sprintf("host='%s' port=%d user='%s' password='%s' dbname='%s'", c.Host, c.Port, c.User, c.Password, c.Database)
}

func TestRestore_GivesAWorkingLedger(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, c := setUp(t, metered.Config{})
	cmd := whole(t, pool, c, "op")
	_, err := metered.Do(ctx, c, cmd, wholeFunc("op", nil))
	require.NoError(t, err)
	fill(t, pool, c, "s", 5)
	const openLease = `select no from metered.open_lease(row('leased', null, 10, 0, '{}', null, null, null, null)::metered.new_charge,
		row('rows', 'me', 1, 1, '1 h', null)::metered.lease_terms, '1 min', 1000)`
	lease := queryRow[int64](t, pool, openLease)
	_, err = pool.Exec(ctx, `select metered.charge_leased(array[row('leased', metered.lease_key($1), 3, 0, '{}', null, null, $1, 0)::metered.new_charge], '1 min', 1000, null, 'raise', true)`, lease)
	require.NoError(t, err)

	other := restored(t, pool)
	require.NoError(t, validate(t, other).Err())
	migrate(t, other, metered.MigrateOptions{River: true}) // River's tables were not dumped
	again := newClient(t, other, metered.Config{})
	out, err := metered.Do(ctx, again, cmd, mustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
	fill(t, other, again, "s", 5)
	u, err := again.Budget.Usage(ctx, other, budget.Query{Scope: "s"})
	require.NoError(t, err)
	require.Equal(t, int64(10), u[0].Used)
	next := queryRow[int64](t, other, openLease)
	require.Greater(t, next, lease)
	for no, spent := range map[int64]int64{lease: 3, next: 0} {
		require.Equal(t, spent, queryRow[int64](t, other, `select spent from metered.settle_lease($1, 'me', null, 1000, null, null)`, no))
	}
	report, err := again.Budget.Verify(ctx, other, budget.VerifyOptions{})
	require.NoError(t, err)
	require.True(t, report.OK(), report.Differences)
}

// A dump without privileges leaves every function to everybody. Whatever is done next takes them back, and says so.
func TestRestore_WithoutPrivilegesGivesNothingToEverybody(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for what, mend := range map[string]func(*testing.T, *pgxpool.Pool) string{
		"Migrate": func(t *testing.T, p *pgxpool.Pool) string {
			report := migrate(t, p, metered.MigrateOptions{})
			require.NotEmpty(t, report.Repaired)
			for _, d := range report.Repaired {
				require.Equal(t, "can be executed by everybody", d.Problem)
			}
			return fmt.Sprint(report.Repaired)
		},
		"GrantSQL":            grantNotices(metered.GrantSQL),
		"GrantMaintenanceSQL": grantNotices(metered.GrantMaintenanceSQL),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			other := restored(t, pool, "--no-privileges", "--no-owner")
			execute(t, other, "create function metered.mine() returns int language sql as 'select 1'")
			found := validate(t, other)
			require.ErrorIs(t, found.Err(), metered.ErrSchemaDiffers)
			everybodys := executable(t, other)
			require.Contains(t, everybodys, "metered.repair_clock")
			require.Len(t, found.Differences, len(everybodys)-1, "all but somebody's own")
			said := mend(t, other)
			for _, f := range everybodys {
				if f != "metered.mine" {
					require.Contains(t, said, strings.TrimPrefix(f, "metered."))
				}
			}
			require.Equal(t, []string{"metered.mine"}, executable(t, other))
			require.NoError(t, validate(t, other).Err())
		})
	}
}

// grantNotices runs the text for a new role, and returns what it says.
func grantNotices(render func(schema, role string) (string, error)) func(*testing.T, *pgxpool.Pool) string {
	return func(t *testing.T, pool *pgxpool.Pool) string {
		role := queryRow[string](t, pgtest.AsRole(t, pool, nil, ""), "select current_user::text")
		text, err := render("", role)
		require.NoError(t, err)
		var said strings.Builder
		config := pool.Config().ConnConfig.Copy()
		config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { said.WriteString(n.Message + "\n") }
		conn, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		defer func() { _ = conn.Close(t.Context()) }()
		_, err = conn.Exec(t.Context(), text, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		return said.String()
	}
}

// executable are the functions of the schema that everybody may execute.
func executable(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return queryRow[[]string](t, pool, `select coalesce(array_agg(p.oid::regproc::text order by 1), '{}') from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and exists
			(select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)`)
}

// The text is ASCII, and so is what the library reads back.
func TestMigrate_WorksInOtherEncodings(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	for _, encoding := range []string{"LATIN1", "EUC_JP", "SQL_ASCII", "WIN1251"} {
		name := strings.ToLower(pool.Config().ConnConfig.Database + "_" + encoding)
		execute(t, pool, fmt.Sprintf("create database %s encoding '%s' template template0 lc_collate 'C' lc_ctype 'C'", name, encoding))
		other, err := pgxpool.New(t.Context(), pgserver.WithDatabase(pgtest.ConnString(pool), name))
		require.NoError(t, err)
		migrate(t, other, metered.MigrateOptions{River: true})
		require.NoError(t, validate(t, other).Err(), encoding)
		c := newClient(t, other, metered.Config{})
		fill(t, other, c, "s", 5)
		execute(t, other, "drop schema metered cascade")
		execute(t, other, strings.ReplaceAll(pgtest.VersionSQL(t, 1, ""), "\u2026", "..."))
		migrate(t, other, metered.MigrateOptions{})
		require.NoError(t, validate(t, other).Err(), encoding)
		other.Close()
		execute(t, pool, "drop database "+name+" with (force)")
	}
}

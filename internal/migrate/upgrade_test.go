package migrate_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// The build of this version is package metered. pgtest.Next is that of the next one.

func (note) Kind() string { return "note" }

// An upgraded schema equals a fresh one and keeps its rows. The build before goes on until the functions that only it calls
// are dropped.
func TestUpgrade_EqualsAFreshSchemaAndLosesNothing(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	next := nextRelease(t)
	fresh := copyOf(t, &freshNext)
	requireWhole(t, fresh, next)
	pool := pgtest.Open(t)
	c := pgtest.NewClient(t, pool, metered.Config{})
	work(t, pool, c, "1")
	changed := change(t, pool, c, "1", false)
	before := rows(t, pool)
	older := examine(t, pool, next, "")
	require.ErrorIs(t, migrate.Err(next.Version, older.Version, older.Differences), fault.ErrNotMigrated)

	report := mustUpgrade(t, pool, next, migrate.Options{})
	require.Equal(t, migrate.Report{From: schema.Version, To: next.Version, Previous: next.Previous()}, report)
	require.NotEmpty(t, report.Previous)
	requireWhole(t, pool, next)
	require.Equal(t, before, rows(t, pool))
	require.Equal(t, "build before", value[string](t, pool, "select claimant from metered.job_keys"))

	require.True(t, command(t, c, "1").Replayed)
	work(t, pool, c, "2")
	again := pgtest.NewClient(t, pool, metered.Config{})
	requireChanged(t, pool, again, "1", changed)
	requireChanged(t, pool, again, "2", change(t, pool, c, "2", false)) // of a build before, which still runs
	work(t, pool, again, "3")                                           // a process that starts now
	requireWork(t, pool, again, 3)
	there, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{})
	require.NoError(t, err)
	require.Equal(t, metered.MigrateReport{From: next.Version, To: next.Version}, there)

	report.From = next.Version
	require.Equal(t, report, mustUpgrade(t, pool, next, migrate.Options{}))
	last := mustUpgrade(t, pool, next, migrate.Options{DropPrevious: true})
	require.Equal(t, migrate.Report{From: next.Version, To: next.Version, Dropped: report.Previous}, last)
	requireWhole(t, pool, next)
	requireSame(t, fresh, pool)
	_, err = metered.Do[any](t.Context(), pgtest.NewClient(t, pool, metered.Config{}), metered.Command{ID: "4"}, nil)
	require.ErrorIs(t, err, metered.ErrSchemaVersion)
	_, err = metered.Migrate(t.Context(), pool, metered.MigrateOptions{})
	require.ErrorIs(t, err, metered.ErrSchemaVersion)
}

func TestUpgrade_CanDropAtOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	next := nextRelease(t)
	pool := pgtest.Open(t)
	report := mustUpgrade(t, pool, next, migrate.Options{DropPrevious: true})
	require.Equal(t, next.Previous(), report.Dropped)
	requireSame(t, copyOf(t, &freshNext), pool)
}

// Many processes of both builds migrate at once, while those of the build before write. One does the work.
func TestUpgrade_IsMadeOnceWhileTheBuildBeforeWorks(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	next := nextRelease(t)
	pool := pgtest.OpenWith(t, pgtest.Options{MaxConns: 30})
	c := pgtest.NewClient(t, pool, metered.Config{})
	var mu sync.Mutex
	from := make(map[int]int)
	require.NoError(t, pgtest.InParallel(12, func(i int) error {
		switch i % 3 {
		case 0:
			work(t, pool, c, fmt.Sprint(i))
			return nil
		case 1:
			_, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{})
			return err
		}
		report, err := upgrade(t.Context(), pool, next, migrate.Options{})
		mu.Lock()
		defer mu.Unlock()
		from[report.From]++
		return err
	}))
	require.Equal(t, map[int]int{schema.Version: 1, next.Version: 3}, from)
	requireWhole(t, pool, next)
	requireWork(t, pool, c, 4)
}

// An upgrade that ends in its middle leaves the version before, which works, and the next attempt is a whole upgrade.
func TestUpgrade_InterruptedLeavesTheVersionBefore(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	next := nextRelease(t)
	fresh := copyOf(t, &freshNext)
	for what, interrupt := range map[string]func(t *testing.T, pool *pgxpool.Pool, cancel func()){
		"its context": func(_ *testing.T, _ *pgxpool.Pool, cancel func()) { cancel() },
		"its session": func(t *testing.T, pool *pgxpool.Pool, _ func()) {
			pgtest.WaitFor(t, "the end of the session", func() bool { // which does not wait for the lock all the time
				return value[bool](t, pool, `select coalesce(bool_or(pg_terminate_backend(pid)), false) from pg_stat_activity
					where datname = current_database() and wait_event_type = 'Lock'`)
			})
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Open(t)
			c := pgtest.NewClient(t, pool, metered.Config{})
			work(t, pool, c, "1")
			before := catalog(t, pool)
			// The new type is there, and the table that changes is locked.
			holder, err := pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = holder.Rollback(context.Background()) }()
			_, err = holder.Exec(t.Context(), "lock table metered.job_keys in share mode")
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := pgtest.Going(func() error {
				_, err := upgrade(ctx, pool, next, migrate.Options{})
				return err
			})
			pgtest.WaitQueued(t, pool, 1)
			interrupt(t, pool, cancel)
			require.Error(t, <-done)
			require.NoError(t, holder.Rollback(t.Context()))
			require.Equal(t, before, catalog(t, pool))
			work(t, pool, c, "2")
			mustUpgrade(t, pool, next, migrate.Options{DropPrevious: true})
			requireSame(t, fresh, pool)
			requireWork(t, pool, c, 2)
		})
	}
}

// A long transaction of the application's has a table: Migrate says so, and lets go again and again, so that nobody waits for
// long behind it.
func TestUpgrade_LetsOthersThroughWhileItWaitsForATable(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	next := nextRelease(t)
	pool := pgtest.Open(t)
	long := pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "a long report" })
	tx, err := long.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(ctx, "lock table metered.schema_version in share mode") // against which the new version's row waits
	require.NoError(t, err)

	waiting := make(chan string, 100)
	done := pgtest.Going(func() error {
		_, err := upgrade(ctx, pool, next, migrate.Options{OnWait: func(_ context.Context, what string) { waiting <- what }})
		return err
	})
	require.Contains(t, <-waiting, "metered.schema_version, which process ")
	require.Contains(t, <-waiting, " holds (a long report), in a transaction since ")
	reading, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err = pool.Exec(reading, "select from metered.ledger limit 1")
	require.NoError(t, err)

	// A second one names the lock that it waits for, and gives up when its time is over.
	until, cancel := context.WithCancel(ctx)
	defer cancel()
	_, err = upgrade(until, pool, next, migrate.Options{OnWait: func(context.Context, string) { cancel() }})
	require.ErrorIs(t, err, budget.ErrBusy)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "waiting for ")
	select {
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	default:
	}
	require.Equal(t, schema.Version, examine(t, pool, next, "").Version)
	require.NoError(t, tx.Rollback(ctx))
	require.NoError(t, <-done)
	requireWhole(t, pool, next)
}

// The file of a tool does the same as Migrate, under any name of the schema.
func TestUpgrade_AsAFileDoesTheSame(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	next := nextRelease(t)
	fresh := copyOf(t, &freshNext)
	for _, name := range []string{"metered", "money_1"} {
		n, err := schema.Parse(name)
		require.NoError(t, err)
		pool := pgtest.OpenWith(t, pgtest.Options{Empty: name != schema.Default}) // another one has the default schema
		if name != schema.Default {
			execute(t, pool, schema.Current().Script(n, 0, false, ""))
		}
		apply := func(sql string) error {
			_, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
			return err
		}
		file := next.Script(n, schema.Version, false, "")
		require.NoError(t, apply(file))
		require.ErrorContains(t, apply(file), "the schema is not of version")
		require.Equal(t, next.Previous(), examine(t, pool, next, name).Previous)
		execute(t, pool, "drop function "+name+".keep_memory()")
		require.NoError(t, apply(next.Script(n, next.Version, false, "")))
		require.NoError(t, apply(next.Script(n, next.Version, true, "")))
		s := examine(t, pool, next, name)
		require.Empty(t, s.Differences)
		require.Empty(t, s.Previous)
		if name == "metered" {
			requireSame(t, fresh, pool)
		}
	}
}

// The roles of the build before need no new grants, and get no more than they had. A view is as readable as it was.
func TestUpgrade_RolesKeepTheirCalls(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	next := nextRelease(t)
	n, err := schema.Parse("")
	require.NoError(t, err)
	pool := pgtest.Open(t)
	usage := pgtest.AsRole(t, pool, nil, `grant usage on schema metered to $role; grant execute on function metered.usage_of to $role;
		grant select on metered.schema_version to $role`)
	view := pgtest.AsRole(t, pool, nil, "grant usage on schema metered to $role; grant select on metered.tokens_words to $role; grant execute on function metered.clock, metered.keep_memory to $role")
	sets := []struct {
		role   *pgxpool.Pool
		render func(string, string) (string, error)
		set    schema.Role
	}{{nil, metered.GrantSQL, schema.Application}, {nil, metered.GrantMaintenanceSQL, schema.Maintenance}, {nil, metered.GrantReportingSQL, schema.Reporting},
		{nil, metered.GrantJobsSQL, schema.Jobs}}
	for i := range sets {
		sets[i].role = pgtest.AsRole(t, pool, sets[i].render, "")
	}
	// A function that is missing costs no role its rights.
	execute(t, pool, "drop function metered.sweep_holds")
	mustUpgrade(t, pool, next, migrate.Options{DropPrevious: true})
	for _, s := range sets {
		grant := func(_, role string) (string, error) {
			return next.GrantSQL(n, s.set, pgx.Identifier{role}.Sanitize()), nil
		}
		require.Equal(t, rightsOf(t, pool, pgtest.AsRole(t, pool, grant, "")), rightsOf(t, pool, s.role))
	}
	require.Zero(t, value[int](t, view, "select count(*) from metered.tokens_words"))
	c, err := metered.New(usage, metered.Config{})
	require.NoError(t, err)
	_, err = c.Budget.Usage(t.Context(), usage, budget.Query{Scope: "s"})
	require.NoError(t, err)
	_, err = c.Budget.Check(t.Context(), usage, budget.Charge{Scope: "s", Amount: 1})
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
}

// rightsOf lists the functions and tables that a role may use.
func rightsOf(t *testing.T, owner, role *pgxpool.Pool) string {
	t.Helper()
	name := value[string](t, role, "select current_user::text")
	return value[string](t, owner, `select string_agg(what, chr(10) order by what) from (
		select 'execute ' || p.oid::regprocedure as what from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and has_function_privilege($1::text, p.oid, 'execute')
		union all
		select x || ' ' || c.oid::regclass from pg_class c, unnest(array['select', 'insert', 'update', 'delete', 'truncate']) x
		where c.relnamespace = 'metered'::regnamespace and c.relkind in ('r', 'v') and has_table_privilege($1::text, c.oid, x)) r`, name)
}

// A member of the owner upgrades for it. Another role gets an error that names the owner.
func TestUpgrade_EverythingBelongsToTheOwnerOfTheTables(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	next := nextRelease(t)
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	owner := pgtest.AsRole(t, pool, nil, "grant create on database "+pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize()+" to $role")
	mustUpgrade(t, owner, schema.Current(), migrate.Options{})
	role := pgtest.AsRole(t, pool, nil, "grant usage on schema metered to $role; grant select on metered.schema_version to $role")
	name := value[string](t, role, "select current_user::text")
	role.Close()
	stranger := pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "set session authorization "+name)
			return err
		}
	})
	_, err := upgrade(ctx, stranger, next, migrate.Options{})
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
	require.ErrorContains(t, err, "the schema belongs to the role")

	mustUpgrade(t, pool, next, migrate.Options{}) // as a superuser
	requireWhole(t, pool, next)
	mustUpgrade(t, stranger, next, migrate.Options{}) // there is nothing left to do
	execute(t, pool, "alter function metered.clock() owner to current_user")
	require.Contains(t, fmt.Sprint(examine(t, pool, next, "").Differences), "function clock() has another owner")
	require.Len(t, mustUpgrade(t, pool, next, migrate.Options{}).Repaired, 1)
	requireWhole(t, pool, next)
}

// A newer type or function shows that somebody set the version back by hand.
func TestUpgrade_RefusesAVersionThatWasSetBack(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	next := nextRelease(t)
	pool := copyOf(t, &freshNext)
	execute(t, pool, fmt.Sprintf("update metered.schema_version set version = %d", schema.Version))
	before := catalog(t, pool)
	_, err := upgrade(t.Context(), pool, next, migrate.Options{})
	s := examine(t, pool, next, "")
	for _, err := range []error{err, migrate.Err(next.Version, s.Version, s.Differences)} {
		require.ErrorIs(t, err, migrate.ErrDiffers)
		require.ErrorContains(t, err, "type claimant is of a later version than schema_version says: it was set back")
	}
	require.Equal(t, before, catalog(t, pool))
}

// A server in another encoding than UTF-8 refuses characters that it lacks.
func TestUpgrade_IsASCII(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	n, err := schema.Parse("")
	require.NoError(t, err)
	for _, r := range nextRelease(t).Script(n, schema.Version, true, "") {
		require.Less(t, r, rune(128))
	}
}

package metered_test

import (
	"context"
	"fmt"
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
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

func TestMigrate_IsSafeAtOnceAndAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true, MaxConns: 40})
	require.Zero(t, relations(t, pool, "metered"), "nothing is created unless Migrate is called")

	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{River: true}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.Zero(t, queryRow[int](t, pool, `select count(*) from pg_locks l join pg_database d on d.oid = l.database
		where d.datname = current_database() and l.locktype = 'advisory'`), "a lock was left behind")
	var applied time.Time
	require.NoError(t, pool.QueryRow(t.Context(), `select applied_at from metered.schema_version where version = $1`, metered.SchemaVersion).Scan(&applied))
	migrate(t, pool, metered.MigrateOptions{River: true})
	var again time.Time
	require.NoError(t, pool.QueryRow(t.Context(), `select max(applied_at) from metered.schema_version`).Scan(&again))
	require.Equal(t, applied, again)
	require.Positive(t, relations(t, pool, "public"), "River's tables were asked for")
}

// River's migrations need no second connection. Each takes the lock by itself, so that many
// pools, and many callers of one, can be at it at once.
func TestMigrate_WorksWithOneConnection(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	single := func(c *pgxpool.Config) { c.MaxConns = 1 }
	// River's own first steps are gone on from.
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	require.NoError(t, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, &rivermigrate.MigrateOpts{TargetVersion: 4})
	require.NoError(t, err)

	pools := make([]*pgxpool.Pool, 4)
	for i := range pools {
		pools[i] = pgtest.Reopen(t, pool, single)
	}
	inParallel(2*len(pools), func(i int) {
		if _, err := metered.Migrate(ctx, pools[i/2], metered.MigrateOptions{River: true}); err != nil {
			t.Error(err)
		}
	})
	versions, err := migrator.Validate(ctx, nil)
	require.NoError(t, err)
	require.True(t, versions.OK, versions.Messages)
	require.Equal(t, len(migrator.AllVersions()), count(t, pool, "river_migration"))

	_, err = pool.Exec(ctx, "create schema elsewhere")
	require.NoError(t, err)
	migrate(t, pools[0], metered.MigrateOptions{River: true, RiverSchema: "elsewhere"})
	require.Equal(t, len(migrator.AllVersions()), count(t, pool, "elsewhere.river_migration"))
}

// Behind a pooler of transactions the next statement may come to another session.
func TestMigrate_LeavesNothingToItsSession(t *testing.T) {
	t.Parallel()
	pool, w := pgtest.Tap(t, pgtest.OpenWith(t, pgtest.Options{Empty: true}), nil)
	w.Each(nil)
	migrate(t, pool, metered.MigrateOptions{River: true})
	open, locks := map[*pgtest.Tapped]bool{}, 0
	for _, f := range w.Sent() {
		for _, sql := range f.SQL {
			switch word, _, _ := strings.Cut(sql, " "); word {
			case "begin":
				open[f.Conn] = true
			case "commit", "rollback":
				open[f.Conn] = false
			}
			if strings.Contains(sql, "select pg_advisory_") {
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
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	role := fmt.Sprintf("owner_%d", time.Now().UnixNano())
	for _, name := range []string{"metered", "select"} { // one that has to be quoted, too
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
	for _, name := range []string{"metered", "select"} {
		migrate(t, owner, metered.MigrateOptions{Schema: name})
		require.Positive(t, relations(t, pool, name))
	}
	_, err := metered.Migrate(t.Context(), owner, metered.MigrateOptions{Schema: "another"})
	require.Error(t, err)
}

func TestSchemaSQL_CanBeAppliedByAnotherToolInItsTransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	ctx := t.Context()
	text, err := metered.SchemaSQL(metered.SchemaSQLOptions{Schema: "money_1"})
	require.NoError(t, err)
	require.False(t, strings.Contains(text, " metered.l"), "a mention of the default schema is left")
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol)
		return err
	}))
	migrate(t, pool, metered.MigrateOptions{Schema: "money_1"})
	require.Zero(t, relations(t, pool, "metered"))
}

func TestSchemas_SideBySideAreIndependent(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	ctx := t.Context()
	migrate(t, pool, metered.MigrateOptions{Schema: "other"})
	cmd := metered.Command{ID: "op", Charges: []budget.Charge{{Scope: "s", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}
	for _, schema := range []string{"metered", "other"} {
		c, err := metered.New(pool, metered.Config{Schema: schema})
		require.NoError(t, err)
		var token tokens.Minted
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			token, err = c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Minute})
			return err
		}))
		cmd.Token = &metered.Redeem{Purpose: "p", Subject: "s", Presented: token.Token.Reveal()}
		out, err := metered.Do[any](ctx, c, cmd, nil)
		require.NoError(t, err)
		require.False(t, out.Replayed)
		report, err := c.Budget.Verify(ctx, pool, budget.VerifyOptions{})
		require.NoError(t, err)
		require.True(t, report.OK())
		require.Equal(t, int64(1), report.Entries)
		_, err = c.Lookup(ctx, pool, "", "op")
		require.NoError(t, err)
	}
}

func TestSchemaNames_AreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool := nowhere(t)
	for _, name := range []string{"Metered", "a-b", `a"b`, "1a", "pg_metered", "a.b", strings.Repeat("a", 64), "é", " "} {
		_, err := metered.SchemaSQL(metered.SchemaSQLOptions{Schema: name})
		require.ErrorIs(t, err, metered.ErrArgument, name)
		_, err = metered.Migrate(t.Context(), pool, metered.MigrateOptions{Schema: name})
		require.ErrorIs(t, err, metered.ErrArgument)
		_, err = metered.Validate(t.Context(), pool, name)
		require.ErrorIs(t, err, metered.ErrArgument)
		_, err = metered.GrantSQL(name, "app")
		require.ErrorIs(t, err, metered.ErrArgument)
	}
	for _, role := range []string{"", strings.Repeat("r", 64), "a\x00b"} {
		_, err := metered.GrantSQL("", role)
		require.ErrorIs(t, err, metered.ErrArgument)
	}
}

func TestCalls_SayThatTheSchemaIsMissing(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	_, err = metered.Do[any](t.Context(), c, metered.Command{ID: "op"}, nil)
	require.ErrorIs(t, err, metered.ErrNotMigrated)
	_, err = c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "s"})
	require.ErrorIs(t, err, budget.ErrNotMigrated)
}

// migrate is Migrate where it must not fail.
func migrate(t *testing.T, pool *pgxpool.Pool, opts metered.MigrateOptions) metered.MigrateReport {
	t.Helper()
	report, err := metered.Migrate(t.Context(), pool, opts)
	require.NoError(t, err)
	return report
}

// relations counts the tables of a schema.
func relations(t *testing.T, pool *pgxpool.Pool, schema string) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(),
		`select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1 and c.relkind = 'r'`, schema).Scan(&n))
	return n
}

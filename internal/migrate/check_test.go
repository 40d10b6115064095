package migrate_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// looks counts how often the schema was looked at.
func looks(w *pgtest.Wire) (n int) {
	for _, f := range w.Sent() {
		if f.Has("What a call needs of the schema") {
			n++
		}
	}
	return n
}

// unprepared makes each statement be sent once.
func unprepared(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec }

func TestClient_LooksAtTheSchemaOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, w := pgtest.Tap(t, pgtest.Open(t), unprepared)
	c := pgtest.NewClient(t, pool, metered.Config{})
	w.Each(nil)
	pgtest.AtOnce(8, func(i int) {
		if err := pgtest.Do(t, c, string(rune('a'+i))); err != nil {
			t.Error(err)
		}
	})
	require.Equal(t, 1, looks(w), "those who come at the same time share it")
	w.Each(nil)
	require.NoError(t, pgtest.Do(t, c, "z"))
	require.Len(t, w.Sent(), 1, "and a later call is as it always was")
}

func TestClient_NamesMissingObjects(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	dropFunctions(t, pool, "revoke_tokens")
	pgtest.Execute(t, pool, "alter table metered.hold_lines drop column refunded")
	c := pgtest.NewClient(t, pool, metered.Config{})
	in := func(f func(tx pgx.Tx) error) error { return pgx.BeginFunc(t.Context(), pool, f) }
	for what, call := range map[string]func() error{
		"Do": func() error { return pgtest.Do(t, c, "op") },
		"DoTx": func() error {
			return in(func(tx pgx.Tx) error {
				_, err := metered.DoTx[any](t.Context(), c, tx, metered.Command{ID: "op"}, nil)
				return err
			})
		},
		"Lookup": func() error { _, err := c.Lookup(t.Context(), pool, "", "op"); return err },
	} {
		err := call()
		require.ErrorIs(t, err, budget.ErrNotMigrated, what)
		require.ErrorContains(t, err, "column hold_lines.refunded is missing; function revoke_tokens(", what)
		require.False(t, metered.Retryable(err))
	}
	pgtest.Execute(t, pool, "alter table metered.hold_lines add column refunded bigint not null default 0")
	pgtest.Migrate(t, pool, metered.MigrateOptions{})
	require.NoError(t, pgtest.Do(t, c, "op"), "what was bad is looked at again")
}

// A difference that makes no call fail stops none.
func TestClient_LeavesDifferencesToValidate(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, `drop index metered.operations_at; alter function metered.clock() set work_mem = '8MB';
		create or replace function metered.clock() returns timestamptz language sql as 'select now()'; grant execute on function metered.clock() to public`)
	require.Len(t, pgtest.Validate(t, pool).Differences, 3)
	require.NoError(t, pgtest.Do(t, pgtest.NewClient(t, pool, metered.Config{}), "op"))
}

func TestClient_WorksOnTheVersionAfterIts(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, "insert into metered.schema_version (version) select max(version) + 1 from metered.schema_version")
	c := pgtest.NewClient(t, pool, metered.Config{})
	require.NoError(t, pgtest.Do(t, c, "op"))
	// The next version drops the functions that only this build calls.
	dropFunctions(t, pool, "run_command_plain")
	require.ErrorIs(t, pgtest.Do(t, c, "op 2"), budget.ErrNotMigrated)
	err := pgtest.Do(t, c, "op 3")
	require.ErrorIs(t, err, metered.ErrSchemaVersion)
	require.ErrorContains(t, err, "function run_command_plain(")

	pool = pgtest.Open(t)
	pgtest.Execute(t, pool, "insert into metered.schema_version (version) select max(version) + 2 from metered.schema_version")
	require.ErrorIs(t, pgtest.Do(t, pgtest.NewClient(t, pool, metered.Config{}), "op"), metered.ErrSchemaVersion)
}

// A call that cannot look at the schema fails with the error of the look, and the next call looks again.
func TestClient_LooksAgainIfItCouldNot(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	app := pgtest.AsRole(t, owner, metered.GrantSQL, "")
	role := pgtest.Value[string](t, app, "select current_user::text")
	pgtest.Execute(t, owner, "revoke select on metered.schema_version from "+role)
	pool, w := pgtest.Tap(t, app, unprepared)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	w.Each(nil)
	for _, id := range []string{"a", "b"} {
		require.ErrorIs(t, pgtest.Do(t, c, id), budget.ErrNotGranted)
	}
	require.Equal(t, 2, looks(w))
	pgtest.Execute(t, owner, "grant select on metered.schema_version to "+role)
	for _, id := range []string{"c", "d"} {
		require.NoError(t, pgtest.Do(t, c, id))
	}
	require.Equal(t, 3, looks(w))
}

// The caller of DoTx has the only connection, and the look is taken on that. It leaves the transaction as it was.
func TestClient_LooksOnTheConnectionOfTheCall(t *testing.T) {
	t.Parallel()
	pool, w := pgtest.Tap(t, pgtest.Open(t), func(cfg *pgxpool.Config) { cfg.MaxConns = 1; unprepared(cfg) })
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	ctx, cancel := pgtest.Patient(t) // for a look that waits for another connection
	defer cancel()
	w.Each(nil)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "set local search_path = metered")
		require.NoError(t, err)
		_, err = metered.DoTx[any](ctx, c, tx, metered.Command{ID: "op"}, nil)
		require.NoError(t, err)
		require.Equal(t, "metered", pgtest.Value[string](t, tx, "show search_path"))
		_, err = c.Lookup(ctx, tx, "", "op")
		return err
	}))
	_, err = c.Lookup(ctx, pool, "", "op")
	require.NoError(t, err)
	require.Equal(t, 1, looks(w))
	for name, db := range map[string]budget.Querier{"a pool": pool, "only queries": struct{ budget.Querier }{pool}} {
		c, err := metered.New(pool, metered.Config{})
		require.NoError(t, err)
		_, err = c.Lookup(ctx, db, "", "op")
		require.NoError(t, err, name)
	}
	require.Equal(t, 3, looks(w))
}

// A build that the schema is too old for makes nothing, however busy the pool is, however slow the look, and whoever has left. The short form
// finds a call that takes over the error of a look whose caller left.
func TestClient_MakesNothingBeforeItHasLooked(t *testing.T) {
	t.Parallel()
	callers := pgtest.Size(3, 4)
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pgtest.Execute(t, owner, "alter table metered.hold_lines drop column refunded") // which these calls would not miss
	pool := pgtest.Reopen(t, owner, func(cfg *pgxpool.Config) { cfg.MaxConns = int32(callers) })
	doOne := func(ctx context.Context, c *metered.Client, id string) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: id, Input: id}, pgtest.Upload(id))
		return err
	}
	doTx := func(ctx context.Context, c *metered.Client, id string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: id, Input: id}, pgtest.Upload(id))
			return err
		})
	}
	open := func(ctx context.Context, c *metered.Client, id string) error {
		_, err := metered.Open[string](ctx, c, metered.Reservation{ID: id, Lines: []holds.Line{{Scope: "s", Amount: 1}}})
		return err
	}
	for _, test := range []struct {
		name string
		call func(context.Context, *metered.Client, string) error
	}{{"DoTx", doTx}, {"Do", doOne}, {"Open", open}} {
		name, call := test.name, test.call
		// All connections are the callers' own, and more of them wait.
		c := pgtest.NewClient(t, pool, metered.Config{})
		pgtest.AtOnce(3*callers, func(i int) {
			if err := call(t.Context(), c, fmt.Sprint(name, i)); !errors.Is(err, budget.ErrNotMigrated) {
				t.Errorf("%s with a full pool: %v", name, err)
			}
		})
		// The look does not end in time, or whoever takes it leaves. Then another one takes it, and it is decided.
		slow, err := owner.Begin(t.Context())
		require.NoError(t, err)
		_, err = slow.Exec(t.Context(), "lock table metered.schema_version in access exclusive mode")
		require.NoError(t, err)
		pgtest.AtOnce(callers, func(i int) {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if err := call(ctx, c, fmt.Sprint(name, " slow ", i)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s with a slow look: %v", name, err)
			}
		})
		leaving, leave := context.WithCancel(t.Context())
		left := pgtest.Going(func() error { return call(leaving, c, name+" left") })
		pgtest.WaitQueued(t, owner, 1)
		var stayed []<-chan error
		for i := range callers - 1 {
			stayed = append(stayed, pgtest.Going(func() error { return call(t.Context(), c, fmt.Sprint(name, " stayed ", i)) }))
		}
		pgtest.WaitFor(t, "all connections to be taken", func() bool { return pool.Stat().AcquiredConns() == int32(callers) })
		leave()
		require.ErrorIs(t, <-left, context.Canceled, name)
		require.NoError(t, slow.Rollback(t.Context()))
		for _, err := range stayed {
			require.ErrorIs(t, <-err, budget.ErrNotMigrated, name)
		}
	}
	for _, table := range []string{"uploads", "metered.operations", "metered.holds"} {
		require.Zero(t, pgtest.Count(t, owner, table), table)
	}
	pgtest.Execute(t, owner, "alter table metered.hold_lines add column refunded bigint not null default 0")
	require.NoError(t, doOne(t.Context(), pgtest.NewClient(t, pool, metered.Config{}), "now"))
}

// dropFunctions drops all of that name, also one that only the build before calls.
func dropFunctions(t *testing.T, pool *pgxpool.Pool, name string) {
	t.Helper()
	signatures := pgtest.Value[[]string](t, pool, `select array_agg(p.oid::regprocedure::text) from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and p.proname = $1`, name)
	pgtest.Execute(t, pool, "drop function "+strings.Join(signatures, ", "))
}

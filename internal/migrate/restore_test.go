package migrate_test

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

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
	load(t, other, dumped(t, pool, options...))
	return other
}

func dumped(t *testing.T, pool *pgxpool.Pool, options ...string) []byte {
	t.Helper()
	dump := exec.Command(program(t, "pg_dump"), append(options, "--schema=metered", "-d", connString(pool))...)
	var errs bytes.Buffer
	dump.Stderr = &errs
	text, err := dump.Output()
	if strings.Contains(errs.String(), "server version mismatch") {
		t.Skip("pg_dump is older than the server")
	}
	require.NoError(t, err, errs.String())
	return text
}

func load(t *testing.T, pool *pgxpool.Pool, text []byte) {
	t.Helper()
	load := exec.Command(program(t, "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-d", connString(pool))
	load.Stdin = bytes.NewReader(text)
	out, err := load.CombinedOutput()
	require.NoError(t, err, string(out))
}

// connString names the pool's database for a program that may not know all of pgx's settings.
func connString(pool *pgxpool.Pool) string {
	c := pool.Config().ConnConfig
	return fmt.Sprintf("host='%s' port=%d user='%s' password='%s' dbname='%s'", c.Host, c.Port, c.User, c.Password, c.Database)
}

func TestRestore_GivesAWorkingLedger(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	pool, c := pgtest.SetUp(t, metered.Config{})
	cmd := pgtest.Whole(t, pool, c, "op")
	_, err := metered.Do(ctx, c, cmd, pgtest.WholeFunc("op", nil))
	require.NoError(t, err)
	pgtest.Fill(t, pool, c, "s", 5)
	changed := change(t, pool, c, "1", false)
	const openLease = `select no from metered.open_lease(row('leased', null, 10, 0, '{}', null, null, null, null)::metered.new_charge,
		row('rows', 'me', 1, 1, '1 h', null)::metered.lease_terms, '1 min', 1000)`
	lease := pgtest.Value[int64](t, pool, openLease)
	_, err = pool.Exec(ctx, `select metered.charge_leased(array[row('leased', metered._lease_key($1), 3, 0, '{}', null, null, $1, 0)::metered.new_charge], '1 min', 1000, null, 'raise', true)`, lease)
	require.NoError(t, err)

	other := restored(t, pool)
	require.NoError(t, pgtest.Validate(t, other).Err())
	pgtest.Migrate(t, other, metered.MigrateOptions{River: true}) // River's tables were not dumped
	again := pgtest.NewClient(t, other, metered.Config{})
	out, err := metered.Do(ctx, again, cmd, pgtest.MustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
	pgtest.Fill(t, other, again, "s", 5)
	requireChanged(t, other, again, "1", changed)
	u, err := again.Budget.Usage(ctx, other, budget.Query{Scope: "s"})
	require.NoError(t, err)
	require.Equal(t, int64(10), u[0].Used)
	next := pgtest.Value[int64](t, other, openLease)
	require.Greater(t, next, lease)
	for no, spent := range map[int64]int64{lease: 3, next: 0} {
		require.Equal(t, spent, pgtest.Value[int64](t, other, `select spent from metered.settle_lease($1, 'me', null, 1000, null, null)`, no))
	}
	report, err := again.Budget.Verify(ctx, other, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

// A dump without privileges leaves every function to everybody. Whatever is done next takes them back, and says so.
func TestRestore_WithoutPrivilegesGivesNothingToEverybody(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	text := dumped(t, pgtest.Open(t), "--no-privileges", "--no-owner")
	template := pgtest.Template{Fill: func(_ context.Context, pool *pgxpool.Pool) error {
		load(t, pool, text)
		return nil
	}}
	for what, mend := range map[string]func(*testing.T, *pgxpool.Pool) string{
		"Migrate": func(t *testing.T, p *pgxpool.Pool) string {
			report := pgtest.Migrate(t, p, metered.MigrateOptions{})
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
			other := copyOf(t, &template)
			pgtest.Execute(t, other, "create function metered.mine() returns int language sql as 'select 1'")
			found := pgtest.Validate(t, other)
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
			require.NoError(t, pgtest.Validate(t, other).Err())
		})
	}
}

// grantNotices runs the text for a new role, and returns its notices.
func grantNotices(render func(schema, role string) (string, error)) func(*testing.T, *pgxpool.Pool) string {
	return func(t *testing.T, pool *pgxpool.Pool) string {
		role := pgtest.Value[string](t, pgtest.AsRole(t, pool, nil, ""), "select current_user::text")
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
	return pgtest.Value[[]string](t, pool, `select coalesce(array_agg(p.oid::regproc::text order by 1), '{}') from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and exists
			(select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)`)
}

// The text is ASCII, and so is the text that the library reads back. The short form finds a dash of Unicode in a function.
func TestMigrate_WorksInOtherEncodings(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	for _, encoding := range pgtest.Size([]string{"LATIN1", "SQL_ASCII"}, []string{"LATIN1", "EUC_JP", "SQL_ASCII", "WIN1251"}) {
		name := strings.ToLower(pool.Config().ConnConfig.Database + "_" + encoding)
		pgtest.Execute(t, pool, fmt.Sprintf("create database %s encoding '%s' template template0 lc_collate 'C' lc_ctype 'C'", name, encoding))
		other, err := pgxpool.New(t.Context(), pgserver.WithDatabase(pgtest.ConnString(pool), name))
		require.NoError(t, err)
		pgtest.Migrate(t, other, metered.MigrateOptions{River: true})
		require.NoError(t, pgtest.Validate(t, other).Err(), encoding)
		c := pgtest.NewClient(t, other, metered.Config{})
		pgtest.Fill(t, other, c, "s", 5)
		other.Close()
		pgtest.Execute(t, pool, "drop database "+name+" with (force)")
	}
}

// A consumer's place comes back with the entries, so each is consumed once. A reader whose cursor is
// kept elsewhere goes on, unless the entry of the cursor is newer than the dump: then it is told, also
// where another one has its number.
func TestRestore_TheFeedGoesOn(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	l := pgtest.NewClient(t, pool, metered.Config{}).Budget
	pgtest.Execute(t, pool, "create table metered.seen (scope text, seq bigint, number bigint unique, primary key (scope, seq))")
	charge := func(pool *pgxpool.Pool, scopes ...string) {
		for _, scope := range scopes {
			_, err := l.ChargeNow(ctx, pool, budget.Charge{Scope: scope, Amount: 1})
			require.NoError(t, err)
		}
	}
	consume := func(pool *pgxpool.Pool) {
		require.NoError(t, l.RunFeed(ctx, pool, "mail", budget.FeedOptions{Max: 2}, func(ctx context.Context, tx pgx.Tx, page []budget.FeedEntry) error {
			for _, e := range page {
				if _, err := tx.Exec(ctx, "insert into metered.seen values ($1, $2, $3)", e.Scope, e.Seq, e.Number); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	read := func(pool *pgxpool.Pool, cursor budget.FeedCursor) (scopes string, last budget.FeedCursor, err error) {
		last = cursor
		for e, err := range l.Feed(ctx, pool, cursor, budget.FeedOptions{}) {
			if err != nil {
				return scopes, last, err
			}
			scopes, last = scopes+e.Scope, e.Cursor
		}
		return scopes, last, nil
	}
	charge(pool, "a", "b", "c")
	consume(pool)
	charge(pool, "d", "e")
	_, kept, err := read(pool, "")
	require.NoError(t, err)
	dump := dumped(t, pool)
	charge(pool, "f", "g")
	consume(pool)
	_, lost, err := read(pool, kept)
	require.NoError(t, err)

	other := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	load(t, other, dump)
	requireLost := func() budget.FeedCursor {
		t.Helper()
		_, _, err := read(other, lost)
		var gap *budget.FeedGapError
		require.ErrorAs(t, err, &gap)
		require.True(t, gap.Lost)
		require.Equal(t, int64(6), gap.First)
		return gap.Start
	}
	requireLost()
	charge(other, "x", "y", "z")
	consume(other)
	require.Equal(t, "abcdexyz", pgtest.Value[string](t, other, "select string_agg(scope, '' order by number) from metered.seen"))
	scopes, _, err := read(other, kept)
	require.NoError(t, err)
	require.Equal(t, "xyz", scopes)
	scopes, _, err = read(other, requireLost())
	require.NoError(t, err)
	require.Equal(t, "xyz", scopes)
}

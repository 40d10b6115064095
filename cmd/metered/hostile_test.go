package main

import (
	"context"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Commands that read use READ ONLY transactions alone.
func TestReading_IsReadOnly(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	for _, args := range [][]string{
		{"migrate"}, {"migrate", "validate"}, {"verify"}, {"purge", "--older-than", "1s", "--dry-run"}, {"repair-clock"}, {"top", "--count", "1"},
		{"usage", "org/acme"}, {"series", "org/acme"}, {"entries", "org/acme"}, {"statement", "org/acme"}, {"holds"}, {"holds", "--by-due"},
		{"holds", "--holder", "bob"}, {"hold", "seat-1"}, {"operation", "order-42", "--tenant", "shop"}, {"explain", "org/acme", "1"},
	} {
		l := cli(t, pool)
		var mu sync.Mutex
		mode, reads := "", 0 // of the open transaction
		l.configure = onStatement(func(sql string, _ []any) {
			mu.Lock()
			defer mu.Unlock()
			switch sql = strings.TrimSpace(sql); {
			case strings.HasPrefix(sql, "begin"):
				mode = sql
			case sql == "commit" || sql == "rollback":
				mode = ""
			case strings.HasPrefix(sql, "--") || sql == ";": // a ping
			case mode == "begin" && (strings.HasPrefix(sql, "set local") || strings.Contains(sql, "schema_version")): // metered.Client looks at the version
			case !strings.Contains(mode, "read only"):
				t.Errorf("metered %s: outside of a READ ONLY transaction: %s", strings.Join(args, " "), sql)
			default:
				reads++
			}
		})
		l.ok(args...)
		require.NotZero(t, reads, args)
	}
}

// Each command that needs a grant says which, before it does anything.
func TestRole_WithoutGrantsGetsTheirNames(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	before := pgtest.Value[int](t, pool, `select count(*)::int from metered.ledger`)
	nobody := as(t, pool, nil)
	app, reporting := as(t, pool, metered.GrantSQL), as(t, pool, metered.GrantReportingSQL)
	for want, lines := range map[need]map[*line][][]string{
		needReporting: {nobody: {{"verify"}, {"usage", "a"}, {"series", "a"}, {"entries", "a"}, {"statement", "a"}, {"holds"}, {"hold", "a"},
			{"operation", "a"}, {"explain", "a", "1"}, {"top", "--count", "1"}}},
		needApplication: {nobody: {{"sweep"}}, reporting: {{"sweep"}}},
		needMaintenance: {nobody: {{"purge", "--older-than", "1s"}, {"repair-clock", "--yes"}}, app: {{"purge", "--older-than", "1s"}, {"repair-clock"}},
			reporting: {{"purge", "--older-than", "1s"}}},
	} {
		for l, all := range lines {
			for _, args := range all {
				r := l.exits(exitNotGranted, args...)
				require.Contains(t, r.err, "lacks the "+string(want)+" grants", args)
				require.Contains(t, r.err, "metered grant "+string(want)+" role_", args)
			}
		}
	}
	for _, args := range [][]string{{"migrate", "up", "--schema", "other"}, {"grant", "application", "pg_monitor", "--apply"}, {"purge", "--older-than", "1s", "--dry-run"}} {
		require.Contains(t, app.exits(exitNotGranted, args...).err, "as the owner of schema", args)
	}
	require.Equal(t, before, pgtest.Value[int](t, pool, `select count(*)::int from metered.ledger`))

	// The grants that the error names are enough.
	role := reporting.exits(exitNotGranted, "sweep").err
	role = strings.Fields(role[strings.Index(role, "metered grant application "):])[3]
	require.Contains(t, cli(t, pool).ok("grant", "application", role, "--apply"), "has the application grants")
	reporting.ok("sweep")
}

// A name may be any text.
func TestNames_OfAnyKindAreTakenAsTheyAre(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	for _, scope := range []string{"two words", "ümlaut/Straße", "日本/東京", "emoji 🙂", "quote'\"`$(x)", "%s%n", "--help", "a\tb\nc\x1b[31m", "' or 1=1 --", strings.Repeat("x", 255)} {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 3, Note: budget.Note{Reason: scope}})
			return err
		}), scope)
		require.Equal(t, []any{scope}, values(l.runBefore("usage", "--json", "--", scope).objects(), "scope"))
		require.Equal(t, []any{3.0}, values(l.runBefore("entries", "--json", "--", scope).objects(), "amount"))
		for _, args := range [][]string{{"usage"}, {"entries"}, {"statement"}, {"explain", "-l", "1/1h"}} {
			args = append(args, "--", scope)
			if args[0] == "explain" {
				args = append(args, "1")
			}
			r := l.runBefore(args...)
			require.NotContains(t, r.out, "\x1b", args)
			require.LessOrEqual(t, strings.Count(r.out, "\n"), 8, "a line is a row: %q", r.out)
		}
	}
	for _, scope := range []string{"", strings.Repeat("x", 256), "a\x00b", "\xff"} {
		require.Equal(t, exitUsage, l.runBefore("usage", "--", scope).code, "%q", scope)
	}
	require.Equal(t, exitUsage, l.run("explain", "a", "0").code)
}

// runBefore is run with the database named in front of a "--".
func (l *line) runBefore(args ...string) result {
	other := *l
	other.url = ""
	return other.run(append([]string{"--database-url", l.url}, args...)...)
}

func TestDatabase_ThatCannotBeHad(t *testing.T) {
	t.Parallel()
	l := &line{t: t, ctx: t.Context()}
	for url, code := range map[string]int{
		"postgres://%zz": exitUsage, "nonsense": exitUsage, "mysql://localhost/x": exitUsage,
		"postgres://nobody:geheim@127.0.0.1:1/x":                    exitFailed,
		"host=/nowhere dbname=x":                                    exitFailed,
		"postgres://nobody:geheim@metered.invalid/x?sslmode=verify": exitUsage,
	} {
		r := l.run("usage", "a", "--database-url", url)
		require.Equal(t, code, r.code, "%s: %s", url, r.err)
		require.NotContains(t, r.err, "geheim")
		require.Empty(t, r.out)
	}
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	for _, schema := range []string{"metered", "other"} {
		r := cli(t, pool).exits(exitSchema, "usage", "a", "--schema", schema)
		require.Contains(t, r.err, "has no schema "+schema)
	}
	require.Contains(t, cli(t, pool).exits(exitUsage, "usage", "a", "--schema", "Not; valid").err, "--schema")
}

// The environment names the database where no flag does, as for psql.
func TestDatabase_FromTheEnvironment(t *testing.T) {
	pool, _ := shop(t)
	config := pool.Config().ConnConfig
	t.Setenv("DATABASE_URL", pgtest.ConnString(pool))
	t.Setenv("PGDATABASE", "nowhere")
	l := &line{t: t, ctx: t.Context()}
	l.ok("usage", "org/acme")
	t.Setenv("DATABASE_URL", "")
	l.exits(exitFailed, "usage", "org/acme")
	t.Setenv("PGHOST", config.Host)
	t.Setenv("PGPORT", url.QueryEscape(strings.TrimSpace(pgtest.Value[string](t, pool, `select setting from pg_settings where name = 'port'`))))
	t.Setenv("PGUSER", config.User)
	t.Setenv("PGPASSWORD", config.Password)
	t.Setenv("PGDATABASE", config.Database)
	l.ok("usage", "org/acme")
	require.Equal(t, "metered", l.application(), "and it says who it is")
}

// application is the application_name that the command line connects with.
func (l *line) application() (name string) {
	other := *l
	var mu sync.Mutex
	other.configure = func(cfg *pgxpool.Config) {
		mu.Lock()
		defer mu.Unlock()
		name = cfg.ConnConfig.RuntimeParams["application_name"]
	}
	other.ok("migrate")
	return name
}

// An interrupt ends each wait: for a server that does not answer, for a lock, for an answer to a question.
func TestInterrupt_EndsEveryWait(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	waiting := func(l *line, ready func(), args ...string) {
		t.Helper()
		ctx, interrupt := context.WithCancel(t.Context())
		defer interrupt()
		l.ctx = ctx
		ended := make(chan result, 1)
		go func() { ended <- l.run(args...) }()
		ready()
		interrupt()
		r := <-ended
		require.Equal(t, exitInterrupted, r.code, r.err)
		require.Contains(t, r.err, "interrupted")
	}
	connecting := make(chan struct{})
	go func() {
		if conn, err := silent.Accept(); err == nil {
			close(connecting)
			defer conn.Close()
			<-t.Context().Done()
		}
	}()
	waiting(&line{t: t, url: "postgres://x@" + silent.Addr().String() + "/x?sslmode=disable"}, func() { <-connecting }, "usage", "a")

	locked, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = locked.Exec(t.Context(), `lock table metered.ledger`)
	require.NoError(t, err)
	queued := func() { pgtest.WaitQueued(t, pool, 1) }
	waiting(cli(t, pool), queued, "entries", "org/acme")
	pgtest.WaitFor(t, "the backend that waited to go", func() bool { return pgtest.Queued(t, pool) == 0 })
	waiting(cli(t, pool), queued, "purge", "--older-than", "1s")
	require.NoError(t, locked.Rollback(t.Context()))
	pgtest.WaitSettled(t, pool)
	require.Equal(t, 9, pgtest.Value[int](t, pool, `select count(*)::int from metered.ledger`), "and nothing was purged")

	clock := pgtest.SetClock(t, pool, time.Now().Add(time.Hour))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "ahead", Amount: 1})
		return err
	}))
	clock.Advance(-time.Hour)
	asked := cli(t, pool)
	asked.silent = true
	errs := &lockedBuffer{}
	asked.errs = errs
	waiting(asked, func() {
		pgtest.WaitFor(t, "the question", func() bool { return strings.Contains(errs.String(), "[y/N]") })
	}, "repair-clock")
}

func TestCommandLine_ThatIsNotUnderstood(t *testing.T) {
	t.Parallel()
	l := &line{t: t, ctx: t.Context()}
	for _, args := range [][]string{
		{"nix"}, {"--nix"}, {"migrate", "nix"}, {"grant"}, {"grant", "all", "x"}, {"grant", "application", ""}, {"usage"}, {"usage", "a", "--window", "x"},
		{"explain", "a"}, {"explain", "a", "x"}, {"explain", "a", "1", "--limit", "x"}, {"purge"}, {"series", "a", "--timezone", "Nowhere/Land"},
		{"series", "a", "--by", "x"}, {"series", "a", "--from", "x"}, {"statement", "a", "--format", "x"}, {"holds", "-n", "-1"}, {"top", "-n", "0"},
		{"top", "--interval", "1ms"}, {"holds", "--by-due", "--holder", "x"},
	} {
		r := l.exits(exitUsage, args...)
		require.NotEmpty(t, r.err, args)
		require.Empty(t, r.out, args)
	}
	for want, args := range map[string][]string{
		"captured": {"holds", "--state", ""}, "golang-migrate": {"migrate", "sql", "--tool", ""}, "maintenance": {"grant", ""},
		"repair-clock": {"rep"}, "operations": {"purge", "--only", ""}, "--older-than": {"purge", "--"},
	} {
		require.Contains(t, l.ok(append([]string{"__complete"}, args...)...), want, "what a shell offers")
	}
	for _, args := range [][]string{{}, {"help"}, {"help", "exit-codes"}, {"help", "verify"}, {"completion", "bash"}, {"completion", "zsh"}, {"completion", "fish"}, {"--version"}} {
		require.NotEmpty(t, l.ok(args...), args)
	}
}

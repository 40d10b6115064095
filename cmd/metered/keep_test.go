package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestVerify_FindsDifferencesAndGoesOnWhereItStopped(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	ok := l.object("verify")
	require.Equal(t, true, ok["ok"])
	require.Equal(t, true, ok["complete"])
	require.Equal(t, []any{9.0, 2.0}, []any{ok["entries"], ok["scopes"]})

	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select 1, 1, clock_timestamp(), 1, 0, 0, 0, 0, 'c', 'scope ' || n from generate_series(1, 200) n`)
	execute(t, pool, `update metered.ledger set spent = 9 where scope in ('org/globex', 'scope 7')`)
	file := filepath.Join(t.TempDir(), "check point.json")
	found := l.exits(exitDifferences, "verify", "--max-differences", "1", "--checkpoint", file)
	require.Contains(t, found.out, "org/globex  1      spent  9   3")
	require.Contains(t, found.out, "Go on with: metered verify --checkpoint '"+file+"'")
	rest := l.exits(exitDifferences, "verify", "--checkpoint", file, "--json").objects()[0]
	require.Equal(t, true, rest["complete"])
	require.Equal(t, []any{"org/globex", "scope 7"}, values(objects(rest["differences"]), "scope"), "what was found before is in it")
	require.NoFileExists(t, file)

	require.Equal(t, 9.0, l.object("verify", "--after", "scope 90")["scopes"])
	require.Contains(t, l.exits(exitDifferences, "verify", "--scope", "scope 7").out, "1 entry of 1 scope, 1 difference.")
	l.ok("verify", "--scope", "scope 8")

	require.NoError(t, os.WriteFile(file, []byte(`{"schema":"other"}`), 0o600))
	require.Contains(t, l.exits(exitUsage, "verify", "--checkpoint", file).err, `is of schema "other"`)
	require.NoError(t, os.WriteFile(file, []byte(`{`), 0o600))
	l.exits(exitUsage, "verify", "--checkpoint", file)
	l.exits(exitUsage, "verify", "--scope", "a", "--after", "b")
}

func objects(list any) (all []map[string]any) {
	for _, o := range list.([]any) {
		all = append(all, o.(map[string]any))
	}
	return all
}

// An interruption in the middle says where to go on, and with a file the next run does.
func TestVerify_InterruptedGoesOnFromItsCheckpoint(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select 1, 1, clock_timestamp(), 1, 0, 0, 0, 0, 'c', 'scope ' || n from generate_series(1, 50) n`)
	file := filepath.Join(t.TempDir(), "verify.json")
	l := cli(t, pool)
	ctx, interrupt := context.WithCancel(t.Context())
	l.ctx = ctx
	l.configure = onStatement(func(sql string, args []any) {
		if strings.Contains(sql, "epoch, spent, refunded") && args[0] == "scope 30" {
			interrupt()
		}
	})
	r := l.exits(exitInterrupted, "verify", "--checkpoint", file)
	require.Contains(t, r.err, "interrupted")
	require.Contains(t, r.out, "It stopped.")
	require.FileExists(t, file)
	whole := cli(t, pool).object("verify", "--checkpoint", file)
	require.Equal(t, []any{52.0, 59.0, true}, []any{whole["scopes"], whole["entries"], whole["complete"]}, "each scope was counted once")
}

func TestRepairClock_FindsShowsAsksAndRepairs(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	now := time.Now()
	clock := pgtest.SetClock(t, pool, now)
	l := as(t, pool, metered.GrantMaintenanceSQL)
	require.Contains(t, l.ok("repair-clock"), "No scope is ahead")
	clock.Advance(time.Hour)
	for _, scope := range []string{"org/acme", "strange scope\t\"ü\n", "z"} {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 1})
			return err
		}))
	}
	clock.Set(now)

	for _, answer := range []string{"", "n\n", "no\n", "what?\n"} {
		l.in = answer
		r := l.exits(exitRefused, "repair-clock")
		require.Contains(t, r.err, "Repair these 3 scopes?")
		require.Contains(t, r.err, `strange scope\t\"ü\n`, "a name cannot tear the table")
		require.Contains(t, r.err, "nothing was done")
	}
	require.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*)::int from metered.ledger where kind = 'k'`))
	l.in = ""
	one := l.objects("repair-clock", "strange scope\t\"ü\n", "--yes", "--actor", "ops", "--reason", "a test")
	require.Equal(t, []any{true}, values(one, "repaired"))
	require.Equal(t, []any{float64(time.Hour.Microseconds())}, values(one, "ahead_us"))
	require.Equal(t, `{"actor": "ops", "reason": "a test"}`, pgtest.Value[string](t, pool, `select note::text from metered.ledger where kind = 'k'`))
	l.in = "yes\n"
	require.Equal(t, 2, strings.Count(l.ok("repair-clock"), "1h"))
	require.Contains(t, l.ok("repair-clock"), "No scope is ahead")
	cli(t, pool).ok("verify")
	l.exits(exitUsage, "repair-clock", "--tolerance", "25h")
}

func TestSweepAndPurge_DoAsTheirDryRun(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	clock := pgtest.SetClock(t, pool, time.Now().Add(2*time.Hour))
	app := as(t, pool, metered.GrantSQL)
	require.Equal(t, 2.0, app.object("sweep")["holds"].(map[string]any)["expired"])
	require.Contains(t, app.ok("sweep"), "holds   0")
	owner, keeper := cli(t, pool), as(t, pool, metered.GrantMaintenanceSQL)
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select n, 1, clock_timestamp(), n, 0, 0, 0, 0, 'c', 'many' from generate_series(1, 100) n`)
	clock.Advance(time.Hour)
	want := []any{95.0, 3.0, 0.0, 1.0, 2.0, 1.0}
	told := owner.objects("purge", "--older-than", "1h", "--dry-run")
	require.Equal(t, []any{"ledger", "holds", "leases", "tokens", "operations", "jobs"}, values(told, "what"))
	require.Equal(t, want, values(told, "rows"))
	require.Equal(t, want, values(owner.objects("purge", "--older-than", "1h", "--dry-run"), "rows"), "nothing was deleted")
	require.Equal(t, want[1:3], values(keeper.objects("purge", "--older-than", "1h", "--only", "leases,holds"), "rows"))
	done := keeper.objects("purge", "--older-than", "1h")
	require.Equal(t, []any{95.0, 0.0, 0.0, 1.0, 2.0, 1.0}, values(done, "rows"))
	owner.ok("verify")
	require.Contains(t, keeper.exits(exitUsage, "purge", "--older-than", "1h", "--only", "nix").err, "is not one of ledger, holds")
	keeper.exits(exitUsage, "purge", "--older-than", "0s")
	keeper.exits(exitUsage, "purge", "--older-than", "soon")
}

func TestMaintain_DoesTheStepsThatItMay(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	clock := pgtest.SetClock(t, pool, time.Now().Add(2*time.Hour))
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select n, 1, clock_timestamp(), n, 0, 0, 0, 0, 'c', 'many' from generate_series(1, 100) n`)
	clock.Advance(time.Hour)
	ages := []string{"--entries", "1h", "--operations", "1h", "--job-keys", "1h", "--holds", "1h", "--leases", "1h", "--tokens", "1h"}
	steps := []any{"sweep holds", "sweep leases", "sweep lots", "purge holds", "purge leases", "purge tokens", "purge operations", "purge job keys", "purge entries"}

	app := as(t, pool, metered.GrantSQL).exits(exitNotGranted, append([]string{"maintain", "--json"}, ages...)...)
	lines := app.objects()
	require.Equal(t, steps, values(lines, "step"))
	require.Equal(t, []any{2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}, values(lines, "done"))
	for _, line := range lines[3:] {
		require.Equal(t, "not_granted", line["code"])
	}
	require.Contains(t, app.err, "lacks the maintenance grants")

	keeper := as(t, pool, metered.GrantMaintenanceSQL)
	kept := keeper.ok("maintain", "--no-sweeps")
	require.Contains(t, kept, "left out: --no-sweeps")
	require.Contains(t, kept, "left out: no --entries")
	done := keeper.objects(append([]string{"maintain", "--no-sweeps"}, ages...)...)
	require.Equal(t, []any{0.0, 0.0, 0.0, 3.0, 0.0, 1.0, 2.0, 1.0, 95.0}, values(done, "done"))
	cli(t, pool).ok("verify")
	keeper.exits(exitUsage, "maintain", "--no-sweeps", "--no-purges")
	keeper.exits(exitUsage, "maintain", "--entries", "soon")
}

// onStatement makes a pool report each statement that it sends.
func onStatement(report func(sql string, args []any)) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = statements(report) }
}

type statements func(sql string, args []any)

func (f statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	f(d.SQL, d.Args)
	return ctx
}

func (f statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
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
)

// previousBuild is the last commit of the version before this one's schema.
const previousBuild = "776e2cf"

// previousTree writes the build before to a directory of its own, or skips the test.
func previousTree(t *testing.T) string {
	t.Helper()
	if err := exec.Command("git", "cat-file", "-e", previousBuild+"^{commit}").Run(); err != nil {
		t.Skipf("the history is not here: git does not know %s", previousBuild)
	}
	dir := t.TempDir()
	archive := exec.CommandContext(t.Context(), "git", "-C", "..", "archive", previousBuild)
	unpack := exec.CommandContext(t.Context(), "tar", "-x", "-C", dir)
	var archiveErrs, unpackErrs bytes.Buffer
	archive.Stderr, unpack.Stderr = &archiveErrs, &unpackErrs
	pipe, err := archive.StdoutPipe()
	require.NoError(t, err)
	unpack.Stdin = pipe
	require.NoError(t, unpack.Start())
	require.NoError(t, archive.Run(), &archiveErrs)
	require.NoError(t, unpack.Wait(), &unpackErrs)
	return dir
}

// build compiles ./rolling in a module.
func build(t *testing.T, dir string) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "rolling")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./rolling")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return program
}

// deployed is a running program of ./rolling.
type deployed struct {
	name  string
	cmd   *exec.Cmd
	stdin io.Closer
	out   bytes.Buffer
	errs  bytes.Buffer
}

func start(t *testing.T, program, name, connString string) *deployed {
	t.Helper()
	p := &deployed{name: name, cmd: exec.Command(program, name, connString)}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.errs
	var err error
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	return p
}

// result is what package main of ./rolling prints.
type result struct {
	Calls   map[string]int
	Units   map[string]int64
	Errors  map[string]int
	Longest time.Duration
}

// stop lets the process end what it is at, and adds what it did to a total.
func (p *deployed) stop(t *testing.T, total map[string]int64) {
	t.Helper()
	require.NoError(t, p.stdin.Close())
	require.NoError(t, p.cmd.Wait(), p.errs.String())
	var r result
	require.NoError(t, json.Unmarshal(p.out.Bytes(), &r), p.out.String())
	t.Logf("%s: %v, the longest call %v", p.name, r.Calls, r.Longest.Round(time.Millisecond))
	require.Empty(t, r.Errors, p.name)
	for _, kind := range []string{"charge", "refund", "hold", "claim", "token", "command", "read", "due", "wallet", "session", "lease"} {
		require.Positive(t, r.Calls[kind], "%s made no call of %s", p.name, kind)
	}
	for scope, n := range r.Units {
		total[scope] += n
	}
}

// Processes of the build before go on, and start again, while the schema is upgraded under them and processes of this
// build begin beside them. What all of them committed is in the ledger, to the unit.
func TestRollingDeploy_BothBuildsWorkOnTheNewSchema(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	tree := previousTree(t)
	require.NoError(t, os.CopyFS(filepath.Join(tree, "rolling"), os.DirFS("rolling")))
	older, newer := build(t, tree), build(t, ".")

	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	_, err := pool.Exec(ctx, pgtest.VersionSQL(t, metered.SchemaVersion-1, ""), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	require.NoError(t, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	conn := connString(pool)
	total := make(map[string]int64)
	work := func() { time.Sleep(1500 * time.Millisecond) }

	first, second := start(t, older, "old 1", conn), start(t, older, "old 2", conn)
	work()
	report, err := metered.Migrate(ctx, pool, metered.MigrateOptions{OnWait: func(_ context.Context, what string) { t.Log("waiting for", what) }})
	require.NoError(t, err)
	require.Equal(t, metered.SchemaVersion-1, report.From)
	require.Empty(t, report.Dropped)
	third := start(t, newer, "new 1", conn)
	work()
	first.stop(t, total)
	again := start(t, older, "old 3", conn) // restarted, it finds the new schema
	work()
	again.stop(t, total)
	second.stop(t, total)
	// Nobody calls what the build before called any more.
	last, err := metered.Migrate(ctx, pool, metered.MigrateOptions{DropPrevious: true})
	require.NoError(t, err)
	require.Equal(t, report.Previous, last.Dropped)
	work()
	third.stop(t, total)

	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"charges", "both", "refunds", "holds", "commands", "wallet", "sessions", "leased"}, slices.Collect(maps.Keys(total)))
	for scope, want := range total {
		u, err := c.Budget.UsageBetween(ctx, pool, scope, time.Time{}, time.Now().Add(time.Hour))
		require.NoError(t, err)
		require.Equal(t, want, u.Charged-u.RefundedOfCharged, scope)
	}
	verified, err := c.Budget.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.True(t, verified.OK(), verified.Differences)
	schema, err := metered.Validate(ctx, pool, "")
	require.NoError(t, err)
	require.Equal(t, metered.SchemaReport{Version: metered.SchemaVersion}, schema)
}

// The tests of the build before pass on the schema of this one: its schema.sql is replaced by that of its version, upgraded.
func TestRollingDeploy_ThePreviousBuildPassesItsOwnTests(t *testing.T) {
	if os.Getenv("METERED_TEST_PREVIOUS_BUILD") == "" {
		t.Skip("it takes ten minutes: set METERED_TEST_PREVIOUS_BUILD=1")
	}
	tree := previousTree(t)
	upgrade, err := metered.SchemaSQL(metered.SchemaSQLOptions{From: metered.SchemaVersion - 1})
	require.NoError(t, err)
	// Its Migrate would refuse a newer version.
	row := fmt.Sprintf("insert into metered.schema_version (version) values (%d);\n", metered.SchemaVersion)
	require.Equal(t, 1, strings.Count(upgrade, row))
	text := pgtest.VersionSQL(t, metered.SchemaVersion-1, "") + strings.ReplaceAll(upgrade, row, "")
	require.NoError(t, os.WriteFile(filepath.Join(tree, "schema.sql"), []byte(text), 0o644))
	cmd := exec.CommandContext(t.Context(), "go", "test", "-short", "-parallel", "4", "-p", "1",
		"-skip", strings.Join(previousBuildFails, "|"), ".", "./budget", "./holds", "./leases", "./tokens", "./jobs", "./wallet")
	cmd.Dir, cmd.Env = tree, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	out, err := cmd.CombinedOutput()
	if err != nil {
		var failed []string
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, "--- FAIL") || strings.Contains(line, "Error:") || strings.Contains(line, "ERROR:") {
				failed = append(failed, line)
			}
		}
		t.Fatalf("%v\n%s", err, strings.Join(failed[:min(len(failed), 100)], ""))
	}
}

// connString names the pool's database.
func connString(pool *pgxpool.Pool) string {
	c := pool.Config().ConnConfig
	return fmt.Sprintf("host='%s' port=%d user='%s' password='%s' dbname='%s'", c.Host, c.Port, c.User, c.Password, c.Database)
}

// previousBuildFails are the tests of the build before that ask for what it cannot do on the new schema, and those that
// take long and say no more.
var previousBuildFails = []string{"UnderStress"}

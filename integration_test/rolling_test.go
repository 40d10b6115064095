package integration_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// build compiles ./rolling, with files that stand for those of this tree.
func build(t *testing.T, overlay map[string]string) (program string) {
	t.Helper()
	dir := t.TempDir()
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), text, 0o644))
	program = filepath.Join(dir, "rolling")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", program, "./rolling").CombinedOutput()
	require.NoError(t, err, string(out))
	return program
}

// nextBuild is the edits that make this tree the build of the next version: its schema, and a call of its function
// with other arguments.
func nextBuild(t *testing.T) map[string]string {
	t.Helper()
	core, err := filepath.Abs("..")
	require.NoError(t, err)
	dir := t.TempDir()
	overlay := make(map[string]string)
	put := func(path string, text []byte) {
		to := filepath.Join(dir, strings.ReplaceAll(path, "/", "_"))
		require.NoError(t, os.WriteFile(to, text, 0o644))
		overlay[filepath.Join(core, path)] = to
	}
	for path, file := range pgtest.NextFiles(t) {
		put("internal/schema/"+path, file.Data)
	}
	for path, edit := range map[string][3]string{
		"internal/schema/release.go": {"const Version = 1\n", "const Version = 2\n", "1"},
		"jobs/claim.go":              {"::regclass), $7)", "::regclass), $7, row('next')::metered.claimant)", "2"},
	} {
		text, err := os.ReadFile(filepath.Join(core, path))
		require.NoError(t, err)
		require.Equal(t, edit[2], strconv.Itoa(strings.Count(string(text), edit[0])), path)
		put(path, []byte(strings.ReplaceAll(string(text), edit[0], edit[1])))
	}
	return overlay
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

// result is the report of package main of ./rolling.
type result struct {
	Calls   map[string]int
	Units   map[string]int64
	Errors  map[string]int
	Longest time.Duration
}

// stop lets the process end its call, and adds its units to a total.
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

// Processes of this build go on, and start again, while processes of the next one upgrade the schema under them and
// begin beside them. The ledger has all units that they committed.
func TestRollingDeploy_BothBuildsWorkOnTheNewSchema(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	older, newer := build(t, nil), build(t, nextBuild(t))
	pool := pgtest.Open(t)
	conn := connString(pool)
	// migrate runs Migrate in processes of the new build, at once, and returns their reports.
	migrate := func(name string, processes int) (reports []metered.MigrateReport) {
		out := make([][]byte, processes)
		require.NoError(t, pgtest.InParallel(processes, func(i int) (err error) {
			out[i], err = exec.CommandContext(ctx, newer, name, conn).Output()
			return err
		}))
		for _, text := range out {
			var r metered.MigrateReport
			require.NoError(t, json.Unmarshal(text, &r))
			reports = append(reports, r)
		}
		return reports
	}
	total := make(map[string]int64)
	work := func() { time.Sleep(1500 * time.Millisecond) } // the processes make calls of each kind all the time

	first, second := start(t, older, "old 1", conn), start(t, older, "old 2", conn)
	work()
	upgrades := 0
	var previous []string
	for _, r := range migrate("migrate", 4) {
		if r.From == metered.SchemaVersion {
			upgrades++
		}
		require.Equal(t, metered.SchemaVersion+1, r.To)
		require.Empty(t, r.Dropped)
		previous = r.Previous
	}
	require.Equal(t, 1, upgrades)
	third := start(t, newer, "new 1", conn)
	work()
	first.stop(t, total)
	again := start(t, older, "old 3", conn) // restarted, it finds the new schema
	work()
	again.stop(t, total)
	second.stop(t, total)
	// No process calls the previous build's functions any more.
	require.Equal(t, previous, migrate("drop previous", 1)[0].Dropped)
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
	require.Empty(t, verified.Differences)
	var claimants []string
	require.NoError(t, pool.QueryRow(ctx, "select array_agg(distinct coalesce(claimant, '')) from metered.job_keys").Scan(&claimants))
	require.ElementsMatch(t, []string{"next", ""}, claimants, "both builds enqueued jobs")
	n, err := schema.Parse("")
	require.NoError(t, err)
	installed, err := pgtest.Next(t).Read(ctx, pool, n)
	require.NoError(t, err)
	require.Empty(t, installed.Differences())
}

// connString names the pool's database.
func connString(pool *pgxpool.Pool) string {
	c := pool.Config().ConnConfig
	return fmt.Sprintf("host='%s' port=%d user='%s' password='%s' dbname='%s'", c.Host, c.Port, c.User, c.Password, c.Database)
}

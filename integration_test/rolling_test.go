package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

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
	p := &deployed{name: name, cmd: exec.Command(program, name, connString, pgtest.Size("400ms", "0s"))}
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

// Processes of the release before go on, and start again, while processes of this build upgrade the schema under them and
// begin beside them. The ledger has all units that they committed.
func TestRollingDeploy_BothBuildsWorkOnTheNewSchema(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	ctx := t.Context()
	older, newer := pgtest.BuildProgram(t, pgtest.Released(t, ".."), "./rolling", "rolling/main.go", "rolling/testdata/names.go"), pgtest.BuildProgram(t, "..", "./rolling")
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	conn := connString(pool)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	require.NoError(t, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	made, err := exec.CommandContext(ctx, older, "migrate", conn).CombinedOutput()
	require.NoError(t, err, string(made))
	// migrate runs Migrate in processes of the new build, at once, and returns their reports.
	migrate := func(name string, processes int) (reports []metered.MigrateReport) {
		out := make([][]byte, processes)
		require.NoError(t, pgtest.InParallel(processes, func(i int) (err error) {
			out[i], err = exec.CommandContext(ctx, newer, name, conn).Output()
			if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
				err = fmt.Errorf("%w: %s", err, failed.Stderr)
			}
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
	work := func() { // the processes make calls of each kind all the time
		entries := pgtest.Count(t, pool, "metered.ledger")
		pgtest.WaitFor(t, "the processes to write", func() bool {
			return pgtest.Count(t, pool, "metered.ledger") >= entries+pgtest.Size(100, 5000)
		})
	}

	first, second := start(t, older, "old 1", conn), start(t, older, "old 2", conn)
	work()
	upgrades := 0
	var previous []string
	for _, r := range migrate("migrate", 4) {
		if r.From < metered.SchemaVersion {
			upgrades++
		}
		require.Equal(t, metered.SchemaVersion, r.To)
		require.Empty(t, r.Dropped)
		previous = r.Previous
	}
	require.Equal(t, 1, upgrades)
	total["credits"] = gatedBeside(t, pool)
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
	require.ElementsMatch(t, []string{"charges", "both", "refunds", "holds", "commands", "wallet", "sessions", "leased", "credits"}, slices.Collect(maps.Keys(total)))
	for scope, want := range total {
		u, err := c.Budget.UsageBetween(ctx, pool, scope, time.Time{}, time.Now().Add(time.Hour))
		require.NoError(t, err)
		require.Equal(t, want, u.Charged-u.RefundedOfCharged, scope)
	}
	verified, err := c.Budget.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, verified.Differences)
	report, err := metered.Validate(ctx, pool, "")
	require.NoError(t, err)
	require.Equal(t, metered.SchemaReport{Version: metered.SchemaVersion}, report)
}

// gatedBeside parks jobs of this build, which start as processes of the other one credit their scope. It returns the units that they spend.
func gatedBeside(t *testing.T, pool *pgxpool.Pool) (spent int64) {
	t.Helper()
	ctx := t.Context()
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	require.NoError(t, err)
	c, err := metered.New(pool, metered.Config{River: client})
	require.NoError(t, err)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Jobs.Run(running, pool, func(err error) { t.Error(err) }) }()
	defer func() { stop(); require.ErrorIs(t, <-done, context.Canceled) }()
	items := make([]jobs.Item, 5)
	var made []jobs.Result
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// The scope's lock keeps credits away, until the first job waits for a long time. The others pass it.
		_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "credits", Amount: 1})
		require.NoError(t, err)
		usage, err := c.Budget.Usage(ctx, tx, budget.Query{Scope: "credits"})
		require.NoError(t, err)
		spent = 1
		for i, amount := range []int64{usage[0].Credited + 5, 3, 1, 1, 1} {
			items[i] = jobs.Item{Args: plainJob{i}, Options: &jobs.Options{GiveBack: true, Hold: &jobs.Units{
				Lines:   []holds.Line{{Scope: "both", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1 << 40)}}},
				Charges: []budget.Charge{{Scope: "credits", Amount: amount, Limits: []budget.Limit{budget.Prepaid(0)}}},
			}}}
			spent += amount
		}
		made, err = c.Jobs.EnqueueMany(ctx, tx, items)
		return err
	}))
	require.True(t, made[0].Parked)
	pgtest.WaitFor(t, "jobs start by credits of the other build", func() bool { return pgtest.Count(t, pool, "metered.parked_jobs") == 0 })
	_, err = pool.Exec(ctx, "update river_job set state = 'retryable', attempt = 1, scheduled_at = now() + interval '1 second' where kind = 'plain'")
	require.NoError(t, err)
	pgtest.WaitFor(t, "jobs that failed start again", func() bool {
		return pgtest.Value[int](t, pool, "select count(*) from river_job where kind = 'plain' and state = 'available' and attempt = 1") == len(items)
	})
	_, err = pool.Exec(ctx, "update river_job set state = 'completed', finalized_at = now() where kind = 'plain'")
	require.NoError(t, err)
	pgtest.WaitFor(t, "their holds have ended", func() bool {
		return pgtest.Value[int](t, pool, "select count(*) from metered.holds where pending and id like 'job/%'") == 0
	})
	return spent
}

// connString names the pool's database.
func connString(pool *pgxpool.Pool) string {
	c := pool.Config().ConnConfig
	return fmt.Sprintf("host='%s' port=%d user='%s' password='%s' dbname='%s'", c.Host, c.Port, c.User, c.Password, c.Database)
}

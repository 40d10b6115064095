package jobs_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// tenant is a job of a tenant that always gets least slots, and above them what the pool of so many has free.
func tenant(name string, least, pool int64) *jobs.Options {
	return &jobs.Options{
		Tenant: name,
		Hold:   &jobs.Units{Lines: []holds.Line{slots("own/"+name, 1, least)}},
		Burst:  &jobs.Units{Lines: []holds.Line{slots("pool", 1, pool)}},
	}
}

func (g *gated) line(scope string) (waiting int) {
	g.t.Helper()
	return pgtest.Value[int](g.t, g.pool, "select coalesce(sum(waiting), 0) from metered.parked_scopes where scope = $1", scope)
}

// ends ends a job in River, and starts those that fit by then.
func (g *gated) ends(id int64) int64 {
	g.t.Helper()
	_, err := g.pool.Exec(g.ctx, "update river_job set state = 'completed', finalized_at = now() where id = $1", id)
	require.NoError(g.t, err)
	return g.release().Released
}

// A tenant has its own slots whatever others do, and the pool's beside them while they are free. In the pool tenants take turns.
func TestBurst_ATenantGetsItsMinimumAndWhatThePoolHasFree(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	var acme []jobs.Result
	for range 6 {
		acme = append(acme, g.mustEnqueue(process{"a"}, tenant("acme", 2, 3)))
	}
	require.True(t, acme[5].Parked, "2 of its own, and 3 of the pool")
	require.False(t, acme[4].Parked)
	require.Equal(t, []int{1, 1}, []int{g.line("own/acme"), g.line("pool")})
	p, err := g.Explain(g.ctx, g.pool, acme[5].JobID)
	require.NoError(t, err)
	require.Equal(t, []string{"own/acme", "acme"}, []string{p.Scope, p.Tenant})
	require.Len(t, p.Refused, 2)
	require.Contains(t, p.Refused[0], `"own/acme" has a limit of 2 in all: 0 used, 2 held`)
	require.Contains(t, p.Refused[1], `"pool" has a limit of 3 in all: 0 used, 3 held`)

	brisk := g.mustEnqueue(process{"b"}, tenant("brisk", 1, 3))
	require.False(t, brisk.Parked, "its minimum, though the pool is full and others wait for it")
	second, third := g.mustEnqueue(process{"b"}, tenant("brisk", 1, 3)), g.mustEnqueue(process{"b"}, tenant("brisk", 1, 3))
	require.True(t, second.Parked && third.Parked)
	require.Equal(t, []int{1, 2, 3}, []int{g.line("own/acme"), g.line("own/brisk"), g.line("pool")})

	require.EqualValues(t, 1, g.ends(acme[2].JobID), "a slot of the pool: acme's job is first")
	require.Equal(t, []int{0, 2, 2}, []int{g.line("own/acme"), g.line("own/brisk"), g.line("pool")})
	require.NotContains(t, g.river(), second.JobID)
	require.EqualValues(t, 1, g.ends(brisk.JobID), "brisk's own slot")
	require.Contains(t, g.river(), second.JobID)
	require.Equal(t, []int{1, 1}, []int{g.line("own/brisk"), g.line("pool")})
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.CancelParked(g.ctx, tx, third.JobID); return err })
	require.Zero(t, g.lines())
	require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"))
	for scope, want := range map[string]int64{"own/acme": 2, "own/brisk": 1, "pool": 3} {
		_, held := g.used(scope)
		require.Equal(t, want, held, scope)
	}
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// Both are free at the same moment: the tenant's own is taken, also where the pool's line is looked at first.
func TestBurst_TakesTheTenantsOwnFirst(t *testing.T) {
	t.Parallel()
	for _, scopes := range [][]string{{"pool"}, {"own/acme"}} {
		g := openGated(t, nil)
		one, two := g.mustEnqueue(process{"a"}, tenant("acme", 1, 1)), g.mustEnqueue(process{"a"}, tenant("acme", 1, 1))
		require.True(t, g.mustEnqueue(process{"a"}, tenant("acme", 1, 1)).Parked)
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := g.book.Release(g.ctx, tx, holds.Release{Tenant: "acme", IDs: []string{jobs.Of(one.Job).Hold, jobs.Of(two.Job).Hold}})
			return err
		})
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			results, err := g.ReleaseIn(g.ctx, tx, scopes...)
			require.Len(t, results, 1)
			return err
		})
		_, own := g.used("own/acme")
		_, pool := g.used("pool")
		require.Equal(t, []int64{1, 0}, []int64{own, pool})
		require.Zero(t, g.lines())
	}
}

// So many units in a window for sure, and the others' above them: by charges, which are spent when the job starts. A choice that can never fit
// is none.
func TestBurst_OfUnitsInAWindow(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	job := func(amount int64) *jobs.Options {
		charge := func(scope string, most int64) *jobs.Units {
			return &jobs.Units{Charges: []budget.Charge{{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.PerWindow(most, time.Minute)}}}}
		}
		return &jobs.Options{Tenant: "acme", Hold: charge("own/acme", 10), Burst: charge("pool", 20), MaxParked: 5}
	}
	for range 5 {
		g.mustEnqueue(process{"a"}, job(6))
	}
	spent, _ := g.used("own/acme")
	pooled, _ := g.used("pool")
	require.Equal(t, []int64{6, 18}, []int64{spent, pooled})
	require.Equal(t, 1, g.line("own/acme"))
	clock.Advance(time.Minute)
	require.EqualValues(t, 1, g.release().Released)
	spent, _ = g.used("own/acme")
	require.EqualValues(t, 12, spent)

	large := g.mustEnqueue(process{"a"}, job(15))
	require.False(t, large.Parked, "by the pool alone")
	require.True(t, g.mustEnqueue(process{"a"}, job(15)).Parked)
	require.Equal(t, []int{0, 1}, []int{g.line("own/acme"), g.line("pool")})
	_, err := g.enqueue(process{"a"}, job(21))
	require.ErrorIs(t, err, budget.ErrExceeded)
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// Limits that are asked at release are those of both choices.
func TestBurst_LimitsAreAskedOfBothChoices(t *testing.T) {
	t.Parallel()
	most := map[string]int64{"own/acme": 0, "pool": 0}
	g := openGated(t, func(c *jobs.Config) {
		c.Limits = func(_ context.Context, _ pgx.Tx, scope string) ([]budget.Limit, error) {
			return []budget.Limit{budget.Lifetime(most[scope])}, nil
		}
	})
	for range 4 {
		require.True(t, g.mustEnqueue(process{"a"}, tenant("acme", 0, 0)).Parked)
	}
	for _, test := range []struct {
		scope     string
		own, pool int64
	}{{"pool", 0, 1}, {"own/acme", 1, 1}, {"pool", 1, 2}} {
		most[test.scope]++
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			results, err := g.ReleaseIn(g.ctx, tx, test.scope)
			require.Len(t, results, 1)
			return err
		})
		_, own := g.used("own/acme")
		_, pool := g.used("pool")
		require.Equal(t, []int64{test.own, test.pool}, []int64{own, pool})
	}
	most["own/acme"], most["pool"] = 2, 3
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.ReleaseIn(g.ctx, tx, "pool"); return err })
	_, own := g.used("own/acme")
	require.EqualValues(t, 2, own, "its own is asked, too, and comes first")
	require.Zero(t, g.lines())
}

// A job that failed waits for either again.
func TestBurst_AFailedJobWaitsForEither(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	o := tenant("acme", 1, 1)
	o.GiveBack = true
	own, burst := g.mustEnqueue(process{"a"}, o), g.mustEnqueue(process{"a"}, o)
	g.fails(burst.JobID, 60)
	require.EqualValues(t, 1, g.release().Ended)
	other := g.mustEnqueue(process{"b"}, tenant("brisk", 1, 1))
	more := g.mustEnqueue(process{"b"}, tenant("brisk", 1, 1))
	require.False(t, other.Parked || more.Parked, "brisk has its own, and the pool")
	clock.Advance(time.Hour)
	require.Zero(t, g.release().Released)
	require.Equal(t, []int{1, 1}, []int{g.line("own/acme"), g.line("pool")})
	require.EqualValues(t, 1, g.ends(own.JobID))
	require.Equal(t, rivertype.JobStateAvailable, g.job(burst.JobID).State)
	require.Zero(t, g.lines())
	require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"))

	o.Burst.Lines = nil
	o.Burst.Charges = []budget.Charge{{Scope: "pool", Amount: 1}}
	_, err := g.enqueue(process{"a"}, o)
	require.ErrorContains(t, err, "Burst.Lines")
	_, err = g.enqueue(process{"a"}, &jobs.Options{Burst: needs(slots("pool", 1, 1)).Hold})
	require.ErrorIs(t, err, budget.ErrArgument)
}

// Another releaser puts a job into the pool's line just now. The job starts by the other line once that is committed, and leaves both.
func TestBurst_AJobLeavesTheLineThatItJoinsJustNow(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		g := openGated(t, nil)
		clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
		o := tenant("acme", 1, 1)
		o.GiveBack = true
		own, burst := g.mustEnqueue(process{"a"}, o), g.mustEnqueue(process{"a"}, o)
		g.fails(burst.JobID, 60)
		require.EqualValues(t, 1, g.release().Ended)
		g.mustEnqueue(process{"b"}, tenant("brisk", 1, 1))
		require.False(t, g.mustEnqueue(process{"b"}, tenant("brisk", 1, 1)).Parked, "it takes the pool's slot")
		clock.Advance(time.Hour)
		in := func(tx pgx.Tx, scope string) {
			results, err := g.ReleaseIn(g.ctx, tx, scope)
			require.NoError(t, err)
			require.Empty(t, results)
		}
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { in(tx, "own/acme"); return nil })
		joins := g.begin(pgx.ReadCommitted)
		in(joins, "pool")
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := g.book.Release(g.ctx, tx, holds.Release{Tenant: "acme", IDs: []string{jobs.Of(own.Job).Hold}})
			return err
		})
		g.in(level, func(tx pgx.Tx) error {
			_, err := tx.Exec(g.ctx, "set local lock_timeout = '1s'") // it waits for nobody
			in(tx, "own/acme")
			return err
		})
		require.NoError(t, joins.Commit(g.ctx))
		require.Equal(t, []int{1, 1}, []int{g.line("own/acme"), g.line("pool")})
		clock.Advance(time.Second)
		require.EqualValues(t, 1, g.release().Released)
		require.Zero(t, g.lines())
		require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"))
	}
}

// Two processes release and work jobs of three tenants: no limit is passed, and no tenant that has jobs in line has a slot of its own free.
// The short form finds a line that counts the bursts that left it.
func TestRun_TenantsHaveTheirMinimumAndShareAPool(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	var mu sync.Mutex
	running, most, all := map[string]int{}, map[string]int{}, 0
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[process]) error {
		count := func(by int) {
			mu.Lock()
			defer mu.Unlock()
			name := jobs.Of(job.JobRow).Tenant
			running[name] += by
			running[""] += by
			most[name], most[""] = max(most[name], running[name]), max(most[""], running[""])
			all += max(by, 0)
		}
		count(1)
		defer count(-1)
		time.Sleep(2 * time.Millisecond)
		return nil
	}))
	for range 2 {
		e, _ := startGated(t, g.pool, g, workers)
		run(t, e, g.pool, func(err error) { t.Error(err) })
	}
	total := pgtest.Size(40, 1000)
	for i := range total {
		g.mustEnqueue(process{fmt.Sprint(i)}, tenant([]string{"a", "a", "a", "b", "c"}[i%5], 1, 2))
	}
	pgtest.WaitFor(t, "all jobs have ended", func() bool { return g.states() == fmt.Sprint("completed ", total) })
	pgtest.WaitFor(t, "all holds have ended", func() bool { return g.pending() == 0 })
	require.Equal(t, total, all)
	require.LessOrEqual(t, most[""], 5)
	require.LessOrEqual(t, max(most["a"], most["b"], most["c"]), 3)
	require.Zero(t, g.lines())
	require.Zero(t, pgtest.Value[int](t, g.pool, `select count(*) from metered.ledger where held > case when scope = 'pool' then 2 else 1 end`))
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

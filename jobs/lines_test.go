package jobs_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// A job that goes on to the next line gets a turn there: behind one job of each other tenant, and not
// behind as many as it had before it in its tenant's own line.
func TestGated_AJobGetsItsTurnInTheLineThatItJoins(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	enqueue := func(tenant string, lines ...holds.Line) jobs.Result {
		o := needs(lines...)
		o.FairKey = tenant
		return g.mustEnqueue(process{tenant}, o)
	}
	own := enqueue("acme", slots("own", 1, 1))
	pool := enqueue("brisk", slots("pool", 1, 1))
	var mine []jobs.Result
	for range 6 {
		mine = append(mine, enqueue("acme", slots("own", 1, 1), slots("pool", 1, 1)))
	}
	for _, r := range mine[:5] { // what is left has the sixth turn of its own line
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.CancelParked(g.ctx, tx, r.JobID); return err })
	}
	last := mine[5].JobID
	for range 4 {
		require.True(t, enqueue("brisk", slots("pool", 1, 1)).Parked)
	}
	require.Equal(t, []int{1, 4}, []int{g.line("own"), g.line("pool")})
	g.end(own.JobID)
	require.Zero(t, g.release().Released)
	require.Equal(t, []int{0, 5}, []int{g.line("own"), g.line("pool")})
	for range 2 {
		before := g.river()
		g.end(pool.JobID)
		require.EqualValues(t, 1, g.release().Released)
		for _, id := range g.river() {
			if !slices.Contains(before, id) {
				pool.JobID = id
			}
		}
	}
	require.Contains(t, g.river(), last)
}

// Each choice of a job in two lines has its own hold. Where both fit, it is that of the first, though
// the other's line is looked at.
func TestBurst_EachChoiceHasItsOwnHold(t *testing.T) {
	t.Parallel()
	for _, free := range [][]string{{"own/acme"}, {"pool"}, {"own/acme", "pool"}} {
		g := openGated(t, nil)
		o := tenant("acme", 1, 1)
		o.Hold.TTL, o.Burst.TTL = 20*time.Minute, 40*time.Minute
		started := map[string]jobs.Result{"own/acme": g.mustEnqueue(process{"a"}, o), "pool": g.mustEnqueue(process{"a"}, o)}
		parked := g.mustEnqueue(process{"a"}, o)
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			var ids []string
			for _, scope := range free {
				ids = append(ids, jobs.Of(started[scope].Job).Hold)
			}
			_, err := g.book.Release(g.ctx, tx, holds.Release{Tenant: "acme", IDs: ids})
			return err
		})
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			results, err := g.ReleaseIn(g.ctx, tx, free[len(free)-1])
			require.Len(t, results, 1)
			return err
		})
		h, err := g.book.Get(g.ctx, g.pool, "acme", jobs.Of(g.job(parked.JobID)).Hold, "")
		require.NoError(t, err)
		require.Equal(t, free[0], h.Lines[0].Scope)
		require.Equal(t, map[string]time.Duration{"own/acme": o.Hold.TTL, "pool": o.Burst.TTL}[free[0]], h.Deadline.Sub(h.PlacedAt), free)
	}
}

// Somebody moves a job to another line while a call that takes it out waits for its first one. The
// call fails as one that collided, and the next one takes it out under the locks of its lines now.
func TestCancelParked_OfAJobThatChangesLines(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	own, pool := g.mustEnqueue(process{"a"}, needs(slots("own", 1, 1))), g.mustEnqueue(process{"a"}, needs(slots("pool", 1, 1)))
	require.False(t, own.Parked || pool.Parked)
	a := g.mustEnqueue(process{"a"}, needs(slots("own", 1, 1), slots("pool", 1, 1)))
	require.Equal(t, []int{1, 0}, []int{g.line("own"), g.line("pool")})
	moves := g.begin(pgx.ReadCommitted)
	_, err := g.book.Release(g.ctx, moves, holds.Release{IDs: []string{jobs.Of(own.Job).Hold}})
	require.NoError(t, err)
	cancel := func() error {
		return pgx.BeginFunc(g.ctx, g.pool, func(tx pgx.Tx) error { _, err := g.CancelParked(g.ctx, tx, a.JobID); return err })
	}
	done := pgtest.Going(cancel)
	g.untilSomebodyWaits()
	results, err := g.ReleaseIn(g.ctx, moves, "own")
	require.NoError(t, err)
	require.Empty(t, results)
	require.NoError(t, moves.Commit(g.ctx))
	require.ErrorIs(t, <-done, budget.ErrSerialization)
	require.Equal(t, []int{0, 1}, []int{g.line("own"), g.line("pool")})
	require.NoError(t, cancel())
	require.Zero(t, g.lines())
}

// A job moves to a line that somebody has locked while jobs before it are dropped. It is dropped once
// that line is free.
func TestDrop_OfAJobThatChangesLines(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	for _, scope := range []string{"first", "pool"} {
		g.mustEnqueue(process{"a"}, needs(slots(scope, 1, 1)))
	}
	own := g.mustEnqueue(process{"a"}, needs(slots("own", 1, 1)))
	for _, lines := range [][]holds.Line{{slots("first", 1, 1)}, {slots("own", 1, 1), slots("pool", 1, 1)}} {
		o := needs(lines...)
		o.MaxWait = time.Minute
		require.True(t, g.mustEnqueue(process{"b"}, o).Parked)
		clock.Advance(time.Second)
	}
	moves := g.begin(pgx.ReadCommitted)
	_, err := g.book.Release(g.ctx, moves, holds.Release{IDs: []string{jobs.Of(own.Job).Hold}})
	require.NoError(t, err)
	results, err := g.ReleaseIn(g.ctx, moves, "own") // not committed
	require.NoError(t, err)
	require.Empty(t, results)
	clock.Advance(time.Hour)
	stops := g.begin(pgx.ReadCommitted)
	_, err = stops.Exec(g.ctx, "select from metered.parked_scopes where scope = 'first' for update")
	require.NoError(t, err)
	done := pgtest.Going(func() error { return jobs.Drop(g.ctx, g.Enqueuer, g.pool) })
	g.untilSomebodyWaits()
	require.NoError(t, moves.Commit(g.ctx))
	locks := g.begin(pgx.ReadCommitted)
	require.NoError(t, g.ledger.Lock(g.ctx, locks, "pool"))
	require.NoError(t, stops.Rollback(g.ctx))
	require.NoError(t, <-done)
	require.Equal(t, []int{0, 0, 1}, []int{g.line("first"), g.line("own"), g.line("pool")})
	require.NoError(t, locks.Rollback(g.ctx))
	require.NoError(t, jobs.Drop(g.ctx, g.Enqueuer, g.pool))
	require.Zero(t, g.lines())
}

// A job runs and rests again between the look that found its row of River changed and the call that
// takes it out: its new wait stays.
func TestRelease_TakesOutNoJobThatWaitsAnew(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	a := g.mustEnqueue(process{"a"}, givesBack(slots("gpu", 1, 1)))
	g.fails(a.JobID, 3600)
	require.EqualValues(t, 1, g.release().Ended)
	require.ErrorIs(t, jobs.TakeOut(g.ctx, g.Enqueuer, g.pool, a.JobID, jobs.Of(a.Job).Hold), jobs.ErrNotParked)
	require.Equal(t, 1, pgtest.Count(t, g.pool, "metered.parked_jobs"))
	require.NoError(t, jobs.TakeOut(g.ctx, g.Enqueuer, g.pool, a.JobID, jobs.Of(g.job(a.JobID)).Hold))
	require.Zero(t, pgtest.Count(t, g.pool, "metered.parked_jobs"))
}

package jobs_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/wallet"
)

// gated is a fixture whose Enqueuer holds units.
type gated struct {
	*fixture
	ledger *budget.Ledger
	book   *holds.Book
}

func openGated(t *testing.T, change func(*jobs.Config)) *gated {
	t.Helper()
	g := &gated{}
	var err error
	g.ledger, err = budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	g.book, err = holds.New(g.ledger, holds.Config{})
	require.NoError(t, err)
	config := jobs.Config{Holds: g.book}
	if change != nil {
		change(&config)
	}
	g.fixture = on(t, database(t, nil), config, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	return g
}

// openGatedOn is an Enqueuer that holds units, on a client.
func openGatedOn(t *testing.T, client *river.Client[pgx.Tx]) *jobs.Enqueuer {
	t.Helper()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	e, err := jobs.New(client, jobs.Config{Holds: book})
	require.NoError(t, err)
	return e
}

// slots holds so many of most units of a scope, while the job lasts.
func slots(scope string, amount, most int64) holds.Line {
	return holds.Line{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Lifetime(most)}}
}

func needs(lines ...holds.Line) *jobs.Options {
	return &jobs.Options{Hold: &jobs.Units{Lines: lines}}
}

func (g *gated) in(level pgx.TxIsoLevel, fn func(tx pgx.Tx) error) {
	g.t.Helper()
	require.NoError(g.t, pgtest.Retried(g.ctx, g.pool, level, fn))
}

// end releases the hold of a job, as its end does.
func (g *gated) end(id int64) {
	g.t.Helper()
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := g.book.Release(g.ctx, tx, holds.Release{IDs: []string{jobs.Of(g.job(id)).Hold}})
		return err
	})
}

func (g *gated) release() jobs.ReleaseReport {
	g.t.Helper()
	report, err := g.Release(g.ctx, g.pool)
	require.NoError(g.t, err)
	return report
}

// river are the ids of the jobs that River has.
func (g *gated) river() []int64 {
	g.t.Helper()
	rows, err := g.pool.Query(g.ctx, "select id from river_job order by id")
	require.NoError(g.t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(g.t, err)
	return ids
}

func (g *gated) lines() (n int) {
	g.t.Helper()
	require.NoError(g.t, g.pool.QueryRow(g.ctx, "select count(*) from metered.parked_scopes").Scan(&n))
	return n
}

func TestGated_StartsWhatFitsAndParksTheRest(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	first := g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	require.False(t, first.Parked)
	require.Equal(t, first.JobID, first.Job.ID)
	row := g.job(first.JobID)
	require.Equal(t, `{"asset": "a"}`, string(row.EncodedArgs))
	require.Equal(t, rivertype.JobStateAvailable, row.State)
	require.Equal(t, river.PriorityDefault, row.Priority)
	require.Equal(t, 25, row.MaxAttempts)
	held, err := g.book.Get(g.ctx, g.pool, "", jobs.Of(row).Hold, jobs.Of(row).Hold)
	require.NoError(t, err)
	require.Equal(t, holds.Held, held.State)

	second := g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1)))
	require.True(t, second.Parked)
	require.Nil(t, second.Job)
	require.Equal(t, []int64{first.JobID}, g.river())
	require.Zero(t, g.release().Released)

	g.end(first.JobID)
	require.Equal(t, jobs.ReleaseReport{Released: 1}, g.release())
	require.Equal(t, []int64{first.JobID, second.JobID}, g.river())
	require.Equal(t, `{"asset": "b"}`, string(g.job(second.JobID).EncodedArgs))
	require.Zero(t, g.lines(), "a line that is empty is no line")
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// A transaction whose snapshot is older than the parked job frees units. It must not miss the job.
func TestGated_FreedByAnOldSnapshot(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	for _, level := range isolationLevels {
		scope := "scope/" + string(level)
		first := g.mustEnqueue(process{"a"}, needs(slots(scope, 1, 1)))
		old := g.begin(level)
		_, err := old.Exec(g.ctx, "select count(*) from river_job")
		require.NoError(t, err)
		second := g.mustEnqueue(process{"b"}, needs(slots(scope, 1, 1)))
		require.True(t, second.Parked)
		_, err = g.book.Release(g.ctx, old, holds.Release{IDs: []string{jobs.Of(first.Job).Hold}})
		if level == pgx.ReadCommitted {
			require.NoError(t, err)
			require.NoError(t, old.Commit(g.ctx))
		} else {
			require.ErrorIs(t, err, budget.ErrSerialization)
			require.NoError(t, old.Rollback(g.ctx))
			g.in(level, func(tx pgx.Tx) error {
				_, err := g.book.Release(g.ctx, tx, holds.Release{IDs: []string{jobs.Of(first.Job).Hold}})
				return err
			})
		}
		require.EqualValues(t, 1, g.release().Released, level)
		g.end(second.JobID)
	}
}

// Nor must one that captures units, which leave their window in time.
func TestGated_CapturedByAnOldSnapshot(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		line := holds.Line{Scope: "scope/" + string(level), Amount: 1, Limits: []budget.Limit{budget.PerWindow(1, time.Minute)}}
		first := g.mustEnqueue(process{"a"}, needs(line))
		capture := func(tx pgx.Tx) error {
			_, err := g.book.Capture(g.ctx, tx, holds.Capture{IDs: []string{jobs.Of(first.Job).Hold}, All: true})
			return err
		}
		old := g.begin(level)
		_, err := old.Exec(g.ctx, "select count(*) from river_job")
		require.NoError(t, err)
		require.True(t, g.mustEnqueue(process{"b"}, needs(line)).Parked)
		require.ErrorIs(t, capture(old), budget.ErrSerialization)
		require.NoError(t, old.Rollback(g.ctx))
		g.in(level, capture)
	}
}

func TestGated_KeyIsOneJobParkedOrNot(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	opts := func(key string, amount int64) *jobs.Options {
		o := needs(slots("gpu", amount, 2))
		o.Key = key
		return o
	}
	first, second := g.mustEnqueue(process{"a"}, opts("a", 2)), g.mustEnqueue(process{"b"}, opts("b", 2))
	require.True(t, second.Parked)
	require.Equal(t, jobs.Result{JobID: first.JobID}, g.mustEnqueue(process{"a"}, opts("a", 2)))
	require.Equal(t, jobs.Result{JobID: second.JobID}, g.mustEnqueue(process{"b"}, opts("b", 2)))
	_, err := g.enqueue(process{"b"}, opts("b", 1))
	require.ErrorIs(t, err, jobs.ErrConflict)
	_, err = g.enqueue(process{"c"}, opts("b", 2))
	require.ErrorIs(t, err, jobs.ErrConflict)

	g.end(first.JobID)
	require.EqualValues(t, 1, g.release().Released)
	require.Equal(t, jobs.Result{JobID: second.JobID}, g.mustEnqueue(process{"b"}, opts("b", 2)))
	require.Equal(t, "b", jobs.Of(g.job(second.JobID)).Key)
	g.requireCounts(2, 2)
}

func TestGated_TenantsTakeTurns(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	running := g.mustEnqueue(process{"running"}, needs(slots("gpu", 1, 1)))
	enqueue := func(tenant string, priority int) int64 {
		o := needs(slots("gpu", 1, 1))
		o.Tenant, o.InsertOpts.Priority = tenant, priority
		r := g.mustEnqueue(process{tenant}, o)
		require.True(t, r.Parked)
		return r.JobID
	}
	var order []int64
	many := []int64{enqueue("many", 0), enqueue("many", 0), enqueue("many", 0)}
	one := enqueue("one", 0)
	low := []int64{enqueue("low", 4), enqueue("low", 4)}
	many = append(many, enqueue("many", 0))
	want := []int64{many[0], one, many[1], many[2], many[3], low[0], low[1]}

	last := running.JobID
	tenant := ""
	for range len(want) + 1 {
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := g.book.Release(g.ctx, tx, holds.Release{Tenant: tenant, IDs: []string{jobs.Of(g.job(last)).Hold}})
			return err
		})
		before := g.river()
		require.EqualValues(t, 1, g.release().Released)
		for _, id := range g.river() {
			if !contains(before, id) {
				last = id
			}
		}
		tenant = jobs.Of(g.job(last)).Tenant
		if order = append(order, last); last == one { // one comes again, and waits for a turn of many's
			again := enqueue("one", 0)
			want = append(want[:3:3], append([]int64{again}, want[3:]...)...)
		}
	}
	require.Equal(t, want, order)
}

func contains(all []int64, id int64) bool {
	for _, one := range all {
		if one == id {
			return true
		}
	}
	return false
}

func TestGated_AWindowThatRollsFreeIsLookedAtInTime(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	rate := func() *jobs.Options {
		return &jobs.Options{Hold: &jobs.Units{Charges: []budget.Charge{{Scope: "rate", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1, time.Minute)}}}}}
	}
	first := g.mustEnqueue(process{"a"}, rate())
	require.False(t, first.Parked)
	clock.Advance(10 * time.Second)
	second, third := g.mustEnqueue(process{"b"}, rate()), g.mustEnqueue(process{"c"}, rate())
	require.True(t, second.Parked && third.Parked)
	due := func() time.Duration {
		var us int64
		require.NoError(t, g.pool.QueryRow(g.ctx, "select metered.next_release()").Scan(&us))
		return time.Duration(us) * time.Microsecond
	}
	// third came while second waited, and asked for a look.
	require.Zero(t, g.release().Released)
	require.Equal(t, 50*time.Second, due())
	clock.Advance(50*time.Second - time.Microsecond)
	require.Zero(t, g.release().Released)
	clock.Advance(time.Microsecond)
	require.EqualValues(t, 1, g.release().Released)
	require.Equal(t, []int64{first.JobID, second.JobID}, g.river())
	require.Equal(t, time.Minute, due())
	clock.Advance(time.Minute)
	require.EqualValues(t, 1, g.release().Released)
	require.Zero(t, g.lines())
}

func TestGated_RefusesWhatCannotWait(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	tooMuch := needs(holds.Line{Scope: "gpu", Amount: 2, Limits: []budget.Limit{budget.PerWindow(1, time.Minute)}})
	_, err := g.enqueue(process{"a"}, tooMuch)
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = g.enqueue(process{"a"}, needs(holds.Line{Scope: "none", Amount: 1, MustExist: true}))
	require.ErrorIs(t, err, budget.ErrScopeUnknown)

	g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	waiting := needs(slots("gpu", 1, 1))
	waiting.MaxParked = 1
	require.True(t, g.mustEnqueue(process{"b"}, waiting).Parked)
	_, err = g.enqueue(process{"c"}, waiting)
	require.ErrorIs(t, err, jobs.ErrFull)
	require.Equal(t, "jobs_full", metered.Code(err))
	require.ErrorContains(t, err, `1 wait for "gpu"`)
	g.requireCounts(1, 0)
}

func TestGated_DropsAfterMaxWait(t *testing.T) {
	t.Parallel()
	var dropped []jobs.Parked
	g := openGated(t, func(c *jobs.Config) {
		c.OnDrop = func(_ context.Context, _ pgx.Tx, p jobs.Parked) error { dropped = append(dropped, p); return nil }
	})
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	o := needs(slots("gpu", 1, 1))
	o.MaxWait, o.Key, o.Tenant = time.Minute, "k", "acme"
	second := g.mustEnqueue(process{"b"}, o)
	clock.Advance(time.Minute - time.Microsecond)
	require.Equal(t, jobs.ReleaseReport{}, g.release())
	clock.Advance(time.Microsecond)
	require.Equal(t, jobs.ReleaseReport{Dropped: 1}, g.release())
	require.Len(t, dropped, 1)
	require.Equal(t, jobs.Parked{
		JobID: second.JobID, Queue: "default", Kind: "process", Key: "k", Tenant: "acme", Fair: "acme", Priority: 1, Args: []byte(`{"asset": "b"}`),
		Scope: "gpu", Amount: 1, ParkedAt: clock.Now().Add(-time.Minute), DropAt: clock.Now(),
	}, dropped[0])
	require.Equal(t, jobs.Result{JobID: second.JobID}, g.mustEnqueue(process{"b"}, o), "its key stays used")
}

func TestGated_IsExplainedCancelledAndReprioritized(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	b, c := g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1))), g.mustEnqueue(process{"c"}, needs(slots("gpu", 1, 1)))
	p, err := g.Explain(g.ctx, g.pool, c.JobID)
	require.NoError(t, err)
	require.EqualValues(t, 2, p.Position)
	require.EqualValues(t, 2, p.Waiting)
	require.Len(t, p.Refused, 1)
	require.Contains(t, p.Refused[0], `"gpu" has a limit of 1 in all: 0 used, 1 held, 1 wanted: when units are freed`)
	require.Zero(t, p.LookedAt, "the end of a hold without a TTL is no time to wait for")

	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.Reprioritize(g.ctx, tx, b.JobID, 4); return err })
	all, err := g.Parked(g.ctx, g.pool, "gpu", 0, 10)
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, c.JobID, all[0].JobID)
	all, err = g.Parked(g.ctx, g.pool, "gpu", c.JobID, 10)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, b.JobID, all[0].JobID)

	for _, id := range []int64{c.JobID, b.JobID} {
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.CancelParked(g.ctx, tx, id); return err })
	}
	require.Zero(t, g.lines())
	_, err = g.Explain(g.ctx, g.pool, c.JobID)
	require.ErrorIs(t, err, jobs.ErrNotParked)
}

func TestGated_LimitsAreAskedAtRelease(t *testing.T) {
	t.Parallel()
	most := int64(1)
	g := openGated(t, func(c *jobs.Config) {
		c.Limits = func(context.Context, pgx.Tx, string) ([]budget.Limit, error) {
			return []budget.Limit{budget.Lifetime(most)}, nil
		}
	})
	for range 4 {
		g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	}
	require.Len(t, g.river(), 1)
	require.Zero(t, g.release().Released)
	most = 3 // a plan was raised
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		results, err := g.ReleaseIn(g.ctx, tx, "gpu")
		require.Len(t, results, 2)
		return err
	})
	require.Len(t, g.river(), 3)
	require.Zero(t, g.release().Released)
}

// A line knows how many of its jobs start in a time, which is of the last hour or two.
func TestGated_ALineKnowsItsRate(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	line := func() (started int64, over, oldest time.Duration) {
		var since, parked time.Time
		require.NoError(t, g.pool.QueryRow(g.ctx, "select started, since, oldest_at from metered.parked_scopes_words").Scan(&started, &since, &parked))
		return started, clock.Now().Sub(since), clock.Now().Sub(parked)
	}
	last := g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1))).JobID
	var waiting []int64
	for range 20 {
		waiting = append(waiting, g.mustEnqueue(process{"b"}, needs(slots("gpu", 1, 1))).JobID)
	}
	for range 13 { // twelve an hour
		started, over, _ := line()
		require.EqualValues(t, over/(5*time.Minute), started)
		clock.Advance(5 * time.Minute)
		g.end(last)
		require.EqualValues(t, 1, g.release().Released)
		last, waiting = waiting[0], waiting[1:]
	}
	started, over, oldest := line()
	require.EqualValues(t, 6, started, "the past counts half")
	require.Equal(t, 65*time.Minute/2, over)
	require.Equal(t, 65*time.Minute, oldest)
}

// Units are freed in each way. A job that waits for them starts at the next look, though no time has passed.
func TestGated_EachWayToFreeUnitsMarksTheLine(t *testing.T) {
	t.Parallel()
	lines := func(scope string, amount int64, limit budget.Limit) *jobs.Options {
		return needs(holds.Line{Scope: scope, Amount: amount, Limits: []budget.Limit{limit}})
	}
	for name, test := range map[string]struct {
		take func(*testing.T, *gated) *jobs.Options
		free func(*gated, pgx.Tx) error
	}{
		"credit": {func(*testing.T, *gated) *jobs.Options { return lines("s", 5, budget.Prepaid(0)) }, func(g *gated, tx pgx.Tx) error {
			_, err := g.ledger.Credit(g.ctx, tx, budget.Credit{Scope: "s", Amount: 5})
			return err
		}},
		"refund": {func(_ *testing.T, g *gated) *jobs.Options {
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
				_, err := g.ledger.Charge(g.ctx, tx, budget.Charge{Scope: "s", Amount: 1})
				return err
			})
			return lines("s", 1, budget.Lifetime(1))
		}, func(g *gated, tx pgx.Tx) error {
			_, err := g.ledger.Refund(g.ctx, tx, budget.Refund{Scope: "s", Seq: 1, Amount: 1})
			return err
		}},
		"capture of a part": {func(_ *testing.T, g *gated) *jobs.Options {
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
				_, err := g.book.Place(g.ctx, tx, holds.Placement{ID: "h", TTL: time.Hour, Lines: []holds.Line{{Scope: "s", Amount: 3}}})
				return err
			})
			return lines("s", 2, budget.Lifetime(3))
		}, func(g *gated, tx pgx.Tx) error {
			_, err := g.book.Capture(g.ctx, tx, holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "s", Amount: 1}}})
			return err
		}},
		"clock repair": {func(t *testing.T, g *gated) *jobs.Options {
			clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
				_, err := g.ledger.Charge(g.ctx, tx, budget.Charge{Scope: "s", Amount: 1})
				return err
			})
			require.True(t, g.mustEnqueue(process{"a"}, lines("s", 1, budget.PerWindow(1, time.Minute))).Parked)
			clock.Advance(time.Hour)
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
				_, err := g.ledger.Credit(g.ctx, tx, budget.Credit{Scope: "s", Amount: 1})
				return err
			})
			clock.Advance(-30 * time.Minute)
			return nil
		}, func(g *gated, tx pgx.Tx) error {
			_, err := g.ledger.RepairClock(g.ctx, tx, "s", budget.Note{})
			return err
		}},
		"a lot that begins at once": {func(*testing.T, *gated) *jobs.Options { return lines("s", 5, budget.Prepaid(0)) }, func(g *gated, tx pgx.Tx) error {
			book, err := wallet.New(g.ledger, wallet.Config{})
			if err == nil {
				_, err = book.Grant(g.ctx, tx, wallet.Grant{Wallet: "s", Amount: 5, Ends: wallet.After(time.Hour), Reference: "a"})
			}
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := openGated(t, nil)
			if o := test.take(t, g); o != nil {
				require.True(t, g.mustEnqueue(process{"a"}, o).Parked)
			}
			require.Zero(t, g.release().Released)
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { return test.free(g, tx) })
			require.EqualValues(t, 1, g.release().Released)
			require.Zero(t, g.lines())
			pgtest.RequireVerified(t, g.pool, g.ledger)
		})
	}
}

// Units of a lot that begins later come without an entry that frees them. The job starts when the lot has begun.
func TestGated_ALotThatBeginsLaterStartsTheJob(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"the lot", "the job"} {
		t.Run(first+" comes first", func(t *testing.T) {
			t.Parallel()
			g := openGated(t, nil)
			clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
			book, err := wallet.New(g.ledger, wallet.Config{})
			require.NoError(t, err)
			grant := func() {
				g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
					_, err := book.Grant(g.ctx, tx, wallet.Grant{Wallet: "s", Amount: 5, Starts: clock.Now().Add(time.Minute), Ends: wallet.After(time.Hour), Reference: "a"})
					return err
				})
			}
			enqueue := func() {
				require.True(t, g.mustEnqueue(process{"a"}, needs(holds.Line{Scope: "s", Amount: 5, Limits: []budget.Limit{budget.Prepaid(0)}})).Parked)
				require.Zero(t, g.release().Released)
			}
			if first == "the lot" {
				grant()
				enqueue()
			} else {
				enqueue()
				grant()
			}
			require.Zero(t, g.release().Released)
			clock.Advance(time.Minute)
			require.EqualValues(t, 1, g.release().Released)
		})
	}
}

// A line of many hundreds is looked at in parts. Units that are freed between two of them let in jobs that were passed before.
func TestGated_UnitsFreedDuringALookAreNotForgotten(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	running := g.mustEnqueue(process{"running"}, needs(slots("gpu", 2, 5)))
	g.mustEnqueue(process{"running"}, needs(slots("gpu", 2, 5)))
	var items []jobs.Item
	for i := range 521 { // the last one fits, and so the look asks each
		o := needs(slots("gpu", 2, 5))
		if i >= 500 {
			o = needs(slots("gpu", 4, 5))
			o.InsertOpts.Priority = 4
		}
		if i == 520 {
			o.Hold.Lines[0].Amount = 1
		}
		items = append(items, jobs.Item{Args: process{fmt.Sprint(i)}, Options: o})
	}
	var all []jobs.Result
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) (err error) {
		all, err = g.EnqueueMany(g.ctx, tx, items)
		return err
	})
	require.True(t, g.lookAt("gpu"))
	g.end(running.JobID)
	require.EqualValues(t, 2, g.release().Released)
	require.Subset(t, g.river(), []int64{all[0].JobID, all[520].JobID})
}

// A job goes on to the line of a scope that refuses it for a time, and starts at that time.
func TestGated_AJobInItsNextLineIsLookedAtInTime(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	rate := []budget.Charge{{Scope: "rate", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1, time.Minute)}}}
	first := g.mustEnqueue(process{"a"}, needs(slots("gpu", 1, 1)))
	both := needs(slots("gpu", 1, 1))
	both.Hold.Charges = rate
	require.True(t, g.mustEnqueue(process{"b"}, both).Parked)
	require.False(t, g.mustEnqueue(process{"c"}, &jobs.Options{Hold: &jobs.Units{Charges: rate}}).Parked)
	g.end(first.JobID)
	require.Zero(t, g.release().Released)
	require.Equal(t, 1, pgtest.Value[int](t, g.pool, "select count(*) from metered.parked_jobs where scope = 'rate'"))
	clock.Advance(time.Minute)
	require.EqualValues(t, 1, g.release().Released)
	require.Zero(t, g.lines())
}

// Config.Limits is asked for the scopes of a part of a line at a time. A job behind many that do not fit is looked at all the same.
func TestGated_LimitsAreAskedForTheWholeLine(t *testing.T) {
	t.Parallel()
	g := openGated(t, func(c *jobs.Config) {
		c.Limits = func(context.Context, pgx.Tx, string) ([]budget.Limit, error) {
			return []budget.Limit{budget.Lifetime(5)}, nil
		}
	})
	g.mustEnqueue(process{"running"}, needs(slots("gpu", 2, 5)))
	var items []jobs.Item
	for i := range 150 {
		amount := int64(4)
		if i == 149 {
			amount = 1
		}
		items = append(items, jobs.Item{Args: process{fmt.Sprint(i)}, Options: needs(slots("gpu", amount, 5), slots(fmt.Sprint("tenant/", i), 1, 5))})
	}
	var all []jobs.Result
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) (err error) {
		all, err = g.EnqueueMany(g.ctx, tx, items)
		return err
	})
	require.Equal(t, jobs.ReleaseReport{Released: 1}, g.release())
	require.Contains(t, g.river(), all[149].JobID)
	require.Greater(t, pgtest.Value[int64](t, g.pool, "select metered.next_release()"), time.Hour.Microseconds(), "the line is not looked at again and again")
}

// A job that cannot be judged, since its window reaches purged entries, keeps no other job of its line waiting.
func TestGated_AJobThatFailsIsPassed(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	for range 100 {
		g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := g.ledger.Charge(g.ctx, tx, budget.Charge{Scope: "s", Amount: 1})
			return err
		})
		clock.Advance(time.Hour)
	}
	running := g.mustEnqueue(process{"running"}, needs(slots("s", 900, 1000)))
	far := needs(holds.Line{Scope: "s", Amount: 940, Limits: []budget.Limit{budget.PerWindow(1000, 90*time.Hour)}})
	require.True(t, g.mustEnqueue(process{"far"}, far).Parked)
	good := g.mustEnqueue(process{"good"}, needs(slots("s", 500, 1000)))
	require.True(t, good.Parked)
	_, err := g.ledger.Purge(g.ctx, g.pool, budget.PurgeOptions{OlderThan: 50 * time.Hour})
	require.NoError(t, err)
	g.end(running.JobID)
	require.Equal(t, jobs.ReleaseReport{Released: 1, Troubled: 1}, g.release())
	require.Contains(t, g.river(), good.JobID)
	require.Equal(t, "waits for a time: the window reaches purged entries", pgtest.Value[string](t, g.pool, "select state || ': ' || trouble from metered.parked_scopes_words"))
	require.Equal(t, 1, pgtest.Value[int](t, g.pool, "select count(*) from metered.parked_jobs_words where trouble = 'the window reaches purged entries'"))
	g.end(good.JobID)
	require.Equal(t, jobs.ReleaseReport{Troubled: 1}, g.release())
	clock.Advance(41 * time.Hour) // so long that it does not any more
	require.Equal(t, jobs.ReleaseReport{Released: 1}, g.release())
	require.Zero(t, g.lines())
}

// Each tenant has a cap of its own, and all share a pool. Four tenants with many jobs keep a tenant with one job waiting for one round, as in the
// pool alone: a job that its tenant's cap lets in waits for its turn in the pool.
func TestGated_TenantsTakeTurnsBehindCapsOfTheirOwn(t *testing.T) {
	t.Parallel()
	each := pgtest.Size(14, 60)
	for name, lines := range map[string]func(tenant string) []holds.Line{
		"pool": func(string) []holds.Line { return []holds.Line{slots("pool", 1, 2)} },
		"own, pool": func(tenant string) []holds.Line {
			return []holds.Line{slots("own/"+tenant, 1, 2), slots("pool", 1, 2)}
		},
		"pool, own": func(tenant string) []holds.Line {
			return []holds.Line{slots("pool", 1, 2), slots("own/"+tenant, 1, 2)}
		},
		"team, own, pool": func(tenant string) []holds.Line {
			return []holds.Line{slots("team", 1, 3), slots("own/"+tenant, 1, 2), slots("pool", 1, 2)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := openGated(t, nil)
			pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
			var running []int64
			enqueue := func(tenant string, n int) (last int64) {
				var items []jobs.Item
				for range n {
					o := needs(lines(tenant)...)
					o.FairKey = tenant
					items = append(items, jobs.Item{Args: process{tenant}, Options: o})
				}
				g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
					all, err := g.EnqueueMany(g.ctx, tx, items)
					for _, r := range all {
						if last = r.JobID; !r.Parked {
							running = append(running, r.JobID)
						}
					}
					return err
				})
				return last
			}
			for _, tenant := range []string{"a", "b", "c", "d"} {
				enqueue(tenant, each)
			}
			one, starts := enqueue("e", 1), 0
			for len(running) > 0 {
				before := g.river()
				g.end(running[0])
				require.Zero(t, g.release().Troubled)
				running = running[1:]
				for _, id := range g.river() {
					if slices.Contains(before, id) {
						continue
					}
					if starts++; id == one {
						require.LessOrEqual(t, starts, 5)
						one = 0
					}
					running = append(running, id)
				}
			}
			require.Zero(t, one)
			require.Len(t, g.river(), 4*each+1)
			require.Zero(t, g.lines())
			pgtest.RequireVerified(t, g.pool, g.ledger)
		})
	}
}

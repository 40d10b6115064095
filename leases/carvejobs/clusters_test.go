package carvejobs_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases/carvejobs"
)

func TestClusters_OneBudgetServesTwo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1_000)
	w.carve("a", 600, time.Hour)
	w.carve("a", 600, time.Hour) // again
	_, err := w.clusters.Carve(t.Context(), carvejobs.RemoteCarving{Link: w.link("a"), From: budget.Charge{Scope: "acme", Amount: 1}, TTL: time.Hour})
	require.ErrorIs(t, err, budget.ErrConflict)
	_, err = w.clusters.Carve(t.Context(), carvejobs.RemoteCarving{Link: w.link("b"), From: budget.Charge{Scope: "acme", Amount: 401, Limits: []budget.Limit{budget.Prepaid(0)}}, TTL: time.Hour})
	require.ErrorIs(t, err, budget.ErrExceeded)
	w.credited("a")
	w.addsUp()
	w.charge("a", 1, 250)
	w.addsUp()
	w.close("a")
	w.addsUp()
	l := w.settled("a")
	require.Equal(t, []any{"away", int64(250), "job:metered_carve_spent"}, []any{l.Mode, l.Spent, l.SettledBy})
	w.addsUp()
	_, err = metered.Do[int](t.Context(), w.away.app, metered.Command{ID: "late", Charges: []budget.Charge{{Scope: "a", Amount: 1}}}, nil)
	require.ErrorIs(t, err, budget.ErrScopeClosed)
	w.close("a") // again
	w.addsUp()
	w.eventually("the jobs' end", func(context.Context) error {
		if pgtest.Value[int](t, w.home.local, `select count(*) from river_job where state <> 'completed'`) > 0 {
			return errOpen
		}
		return nil
	})
}

// A child that nobody closes is closed at its end, by a job, and the job waits for the hold in it.
func TestClusters_ADeadlineEndsAChild(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1_000)
	w.carve("a", 600, time.Hour)
	w.credited("a")
	w.charge("a", 1, 10)
	var id string
	require.NoError(t, pgx.BeginFunc(t.Context(), w.away.local, func(tx pgx.Tx) error {
		h, err := w.away.app.Holds.Place(t.Context(), tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{{Scope: "a", Amount: 40}}})
		id = h.ID
		return err
	}))
	l, err := w.get(t.Context(), w.home, "a")
	require.NoError(t, err)
	// River's clock is the server's: it is the job that is moved.
	ends := pgtest.Value[time.Time](t, w.away.local, `with scheduled as (select id, scheduled_at from river_job where kind = 'metered_carve_end')
		update river_job j set scheduled_at = now() from scheduled s where s.id = j.id returning s.scheduled_at`)
	require.WithinDuration(t, l.EndsAt, ends, 0, "the job is due when the child is")
	w.eventually("the end", func(ctx context.Context) error {
		if pgtest.Value[bool](t, w.away.local, `select exists (select from metered.ledger where scope = 'a' and kind = 'z')`) {
			return nil
		}
		return errOpen
	})
	w.addsUp()
	require.NoError(t, pgx.BeginFunc(t.Context(), w.away.local, func(tx pgx.Tx) error {
		_, err := w.away.app.Holds.Capture(t.Context(), tx, holds.Capture{IDs: []string{id}, Lines: []holds.Line{{Scope: "a", Amount: 25}}})
		return err
	}))
	w.charged["a"] += 25
	require.Equal(t, int64(35), w.settled("a").Spent)
	w.addsUp()
}

// cut makes a site unreachable for the process that carves, and not for those beside it.
func (s *site) cut(yes bool) {
	s.wire.Refuse(yes)
	s.wire.Each(func(f *pgtest.Flush) {
		if yes {
			f.Lose()
		}
	})
}

// While the network is cut nothing is lost, and nothing is used twice.
func TestClusters_ACutNetwork(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1_000)

	t.Log("the units do not arrive in time: they come back")
	w.away.cut(true)
	w.carve("a", 100, time.Second)
	time.Sleep(1500 * time.Millisecond) // the TTL passes by the real clock of two servers, and nothing may happen
	w.addsUp()
	l, err := w.get(t.Context(), w.home, "a")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt, "nobody knows whether they arrived")
	w.away.cut(false)
	require.Zero(t, w.settled("a").Spent)
	w.addsUp()
	require.Zero(t, pgtest.Value[int](t, w.away.local, `select count(*) from metered.ledger where scope = 'a' and kind = 'd'`))

	t.Log("the end comes while home cannot be reached: all counts until it can")
	w.carve("b", 100, time.Hour)
	w.credited("b")
	w.home.cut(true)
	w.charge("b", 1, 30)
	w.close("b")
	time.Sleep(300 * time.Millisecond) // jobs try, and nothing may happen
	w.addsUp()
	l, err = w.get(t.Context(), w.home, "b")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt)
	w.home.cut(false)
	require.Equal(t, int64(30), w.settled("b").Spent)
	w.addsUp()

	t.Log("it is closed before the units arrive: they do not")
	w.close("c")
	w.addsUp()
	w.carve("c", 100, time.Hour)
	require.Zero(t, w.settled("c").Spent)
	w.addsUp()
	require.Zero(t, pgtest.Value[int](t, w.away.local, `select count(*) from metered.ledger where scope = 'c' and kind = 'd'`))

	t.Log("the cluster is written off: its later messages change nothing")
	w.carve("d", 100, time.Hour)
	w.credited("d")
	w.charge("d", 1, 10)
	w.away.cut(true)
	l, err = w.clusters.WriteOff(t.Context(), w.link("d"), budget.Note{Actor: "operator"})
	require.NoError(t, err)
	require.Equal(t, []any{int64(100), "operator"}, []any{l.Spent, l.SettledBy})
	w.writtenOff["d"] = true
	w.addsUp()
	w.charge("d", 2, 10)
	w.away.cut(false)
	w.close("d")
	w.eventually("the tale", func(context.Context) error {
		if pgtest.Value[int](t, w.away.local, `select count(*) from river_job where state <> 'completed' and kind = 'metered_carve_spent'`) > 0 {
			return errOpen
		}
		return nil
	})
	w.addsUp()
}

// A scope that is in use cannot be a child: home has everything back.
func TestClusters_AChildThatIsInUseGetsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1_000)
	require.NoError(t, pgx.BeginFunc(t.Context(), w.away.local, func(tx pgx.Tx) error {
		_, err := w.away.app.Budget.Credit(t.Context(), tx, budget.Credit{Scope: "used", Amount: 5})
		return err
	}))
	w.carve("used", 100, time.Hour)
	require.Zero(t, w.settled("used").Spent)
	u, err := w.away.app.Budget.Usage(t.Context(), w.away.local, budget.Query{Scope: "used"})
	require.NoError(t, err)
	require.Equal(t, int64(5), u[0].Credited)
}

// Each server is killed (-9) before and after each statement of each step, alone or with the other, and they come back in
// both orders.
func TestClusters_KilledAtEveryStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1_000_000)
	steps := []struct {
		name, call string
		home       bool // where it runs
	}{{"carve", ".carve(", true}, {"credit", ".receive_child(", false}, {"close", ".end_child(", false}, {"settle", ".settle_away(", true}}
	n := 0
	for i, step := range steps {
		statements := []string{"begin_command", step.call, "river_job", "complete_command"}
		if step.name == "settle" { // it enqueues nothing
			statements = []string{"begin_command", step.call, "complete_command"}
		}
		for j, statement := range statements {
			for k, after := range []bool{false, true} {
				n++
				if !pgtest.Long && n%7 != 0 { // every seventh place, at each step and with each order of recovery
					continue
				}
				on, other := w.away, w.home
				if step.home {
					on, other = w.home, w.away
				}
				victims := [][]*site{{on}, {other}, {on, other}, {other, on}}[(i+2*j+k+n/8)%4]
				name := fmt.Sprintf("%s/%s/after=%t/%d", step.name, statement, after, n)
				t.Log(name)
				child := fmt.Sprint("run/", n)
				struck := make(chan struct{})
				arm := func() {
					var once sync.Once
					on.wire.Each(func(f *pgtest.Flush) {
						if f.Has(statement) {
							once.Do(func() { w.strike(f, after, victims, struck) })
						}
					})
				}
				if i < 2 {
					arm()
				}
				w.carve(child, 100, time.Hour)
				w.credited(child)
				recovered := func() {
					select {
					case <-struck:
					case <-time.After(time.Until(pgtest.Patience(t))):
						t.Fatal(name, "was not struck")
					}
					for _, s := range []*site{w.home, w.away} {
						s.local.Reset() // no connection of before is used again
						w.eventually(name, s.local.Ping)
					}
					w.addsUp()
				}
				if i < 2 {
					recovered()
				}
				w.charge(child, 1, 20)
				w.charge(child, 2, int64(n))
				w.addsUp()
				if i >= 2 {
					arm()
				}
				w.close(child)
				l := w.settled(child)
				recovered()
				on.wire.Each(func(*pgtest.Flush) {})
				require.Equal(t, 20+int64(n), l.Spent, name)
			}
		}
	}
	t.Log(n, "kills")
}

// strike kills servers, and brings them back in that order.
func (w *world) strike(f *pgtest.Flush, after bool, victims []*site, struck chan struct{}) {
	kill := func() {
		for _, s := range victims {
			if err := s.server.Kill(); err != nil {
				w.Error(err)
			}
		}
		go func() {
			defer close(struck)
			for _, s := range victims {
				time.Sleep(30 * time.Millisecond) // in between one is back and the other is not
				if err := s.server.Restart(context.Background()); err != nil {
					w.Error(err)
				}
			}
			for _, s := range []*site{w.home, w.away} {
				w.eventually("rescue", s.rescue)
			}
		}()
	}
	if after {
		f.Deliver = func() {
			f.Conn.Answer = f.Ask()
			kill()
		}
		return
	}
	kill()
}

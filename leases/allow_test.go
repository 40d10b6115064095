package leases_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// tapped is a Pool over a wire.
func (f *fixture) tapped(rule leases.Rule, noRecall bool) (*leases.Pool, *pgtest.Wire) {
	f.Helper()
	db, w := pgtest.Tap(f, f.db, nil)
	p, err := leases.New(db, f.ledger, leases.Config{Rules: []leases.Rule{rule}, NoRecall: noRecall})
	require.NoError(f, err)
	f.Cleanup(func() { _ = p.Close(context.Background()) })
	return p, w
}

// warmAllow calls Allow until a slice is there, and returns how many units were let in.
func (f *fixture) warmAllow(p *leases.Pool, c budget.Charge) (allowed int64) {
	f.Helper()
	for allowed < 1000 {
		require.NoError(f, p.Allow(f.Context(), c))
		if allowed += c.Amount; f.usage(c.Scope).Leased > 0 {
			return allowed
		}
	}
	f.Fatal("no slice")
	return 0
}

// Without Postgres Allow goes on as long as its slices last, then refuses with ErrUnavailable, and goes on when Postgres
// is back. At the end the units that it let in are in the ledger.
func TestAllow_WithoutPostgresGoesOnAsLongAsItsSlicesLast(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p, w := f.tapped(leases.Rule{MinSlice: 50, MaxSlice: 50, TTL: time.Minute, Idle: time.Minute}, true)
	c := charge(1, budget.Lifetime(100_000))
	allowed := f.warmAllow(p, c)
	w.Refuse(true)
	w.Each(func(x *pgtest.Flush) { x.Lose() })
	more := int64(0)
	for ; ; more++ {
		err := p.Allow(t.Context(), c)
		if err != nil {
			require.ErrorIs(t, err, leases.ErrUnavailable)
			break
		}
		require.Less(t, more, int64(100), "no more than two slices")
	}
	require.GreaterOrEqual(t, more, int64(20))
	for range 200 {
		require.ErrorIs(t, p.Allow(t.Context(), c), leases.ErrUnavailable)
	}
	w.Refuse(false)
	w.Each(nil)
	allowed += more
	pgtest.WaitFor(t, "Postgres to be asked again", func() bool { return p.Allow(t.Context(), c) == nil })
	require.Equal(t, allowed+1, f.settled("hot", p))
	require.ErrorIs(t, p.Allow(t.Context(), c), leases.ErrClosed)
}

// Nothing is let in by default, by a process that has never reached Postgres.
func TestAllow_WithoutPostgresFromTheBeginningLetsNothingIn(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p, w := f.tapped(leases.Rule{}, true)
	w.Refuse(true)
	for range 20 {
		require.ErrorIs(t, p.Allow(t.Context(), charge(1)), leases.ErrUnavailable)
		require.ErrorIs(t, p.Allow(t.Context(), charge(1), budget.Charge{Scope: "other", Amount: 1}), leases.ErrUnavailable)
		time.Sleep(10 * time.Millisecond) // real time, in which the pool tries to connect again
	}
	require.Zero(t, f.usage("hot").Spent)
}

func TestAllow_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p := f.pool(patient)
	tx := f.begin(pgx.ReadCommitted)
	require.NoError(t, f.ledger.Lock(t.Context(), tx, "hot"))
	for range 5 { // directly, and waiting for a slice
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		require.ErrorIs(t, p.Allow(ctx, charge(1)), context.DeadlineExceeded)
		cancel()
	}
	pgtest.WaitFor(t, "the request for a slice to be the only one that waits", func() bool {
		return pgtest.Value[bool](t, f.db, `select coalesce(array_agg(query like '%open_lease%') = '{t}', false) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`)
	})
	require.NoError(t, tx.Rollback(t.Context()))
	pgtest.WaitSettled(t, f.db)
	require.Zero(t, f.usage("hot").Spent)
}

// Several charges are spent all or none, from leases and from the ledger alike.
func TestAllow_SeveralAreAllOrNone(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p := f.pool(leases.Rule{})
	at := func(scope string, amount, most int64) budget.Charge {
		return budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Lifetime(most)}}
	}
	leased := f.warmAllow(p, at("leased", 1, 100_000))
	for _, full := range []string{"full", "full too"} {
		require.NoError(t, p.Allow(t.Context(), at(full, 5, 5)))
		for range 2 { // by the ledger, and from memory
			err := p.Allow(t.Context(), at("leased", 1, 100_000), at("cold", 1, 100), at(full, 1, 5))
			var refused *budget.ExceededError
			require.ErrorAs(t, err, &refused)
			require.Len(t, refused.Refusals, 1)
			require.Equal(t, full, refused.Refusals[0].Scope)
		}
	}
	require.Zero(t, f.usage("cold").Used)
	require.NoError(t, p.Allow(t.Context(), at("leased", 2, 100_000), at("cold", 3, 100), at("other", 4, 100)))
	require.ErrorIs(t, p.Allow(t.Context(), at("leased", 2, 100_000), at("cold", 0, 100)), budget.ErrArgument)
	require.NoError(t, p.Close(t.Context()))
	require.Equal(t, int64(3), f.usage("cold").Used)
	require.Equal(t, int64(4), f.usage("other").Used)
	require.Equal(t, leased+2, f.usage("leased").Used)
}

// A refusal by a window is repeated from memory, with its exact retry time and without a call, and ends at that time.
func TestAllow_RefusesFromMemoryUntilTheRetryTime(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t)
	p, w := f.tapped(leases.Rule{}, true)
	const window = 1500 * time.Millisecond
	c := charge(1, budget.PerWindow(10, window))
	var refused *budget.ExceededError
	var begun []time.Time // of the charges that were let in: more than ten where they take long
	var asked time.Time
	for refused == nil && len(begun) < 1000 {
		asked = time.Now()
		if err := p.Allow(t.Context(), c); err != nil {
			require.ErrorAs(t, err, &refused)
		} else {
			begun = append(begun, asked)
		}
	}
	require.NotNil(t, refused)
	first := begun[len(begun)-10]
	earliest, retry := asked.Add(refused.RetryAfter()), time.Now().Add(refused.RetryAfter())
	// A window after the first of them, which was between then and now. The database's clock is this machine's.
	require.False(t, retry.Before(first.Add(window)), "%v too early", first.Add(window).Sub(retry))
	require.False(t, retry.After(time.Now().Add(window)))
	pgtest.WaitSettled(t, f.db)
	w.Each(func(*pgtest.Flush) {})
	late := false
	ticks := time.NewTicker(5 * time.Millisecond)
	defer ticks.Stop()
	for !late && time.Until(earliest) > 50*time.Millisecond {
		<-ticks.C
		asked := time.Now()
		err := p.Allow(t.Context(), c)
		if err == nil { // on a machine that stood still
			require.False(t, time.Now().Before(earliest))
			late = true
			continue
		}
		require.ErrorAs(t, err, &refused)
		require.False(t, asked.Add(refused.RetryAfter()).After(retry))
		require.False(t, time.Now().Add(refused.RetryAfter()).Before(earliest))
	}
	for _, x := range w.Sent() {
		require.False(t, !late && (x.Has("charge") || x.Has("open_lease")), "%v", x.SQL)
	}
	if late { // the room of the first of them is taken again
		return
	}
	time.Sleep(time.Until(retry) + 5*time.Millisecond) // the process remembers the refusal by its own clock
	require.NoError(t, p.Allow(t.Context(), c))
}

// A credit, and a release, end a refusal that is remembered within Rule.RememberRefusal.
func TestAllow_ARememberedRefusalEndsWithACredit(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	const remembered = 200 * time.Millisecond
	p, w := f.tapped(leases.Rule{RememberRefusal: remembered}, true)
	c := charge(1, budget.Lifetime(10))
	for range 10 {
		require.NoError(t, p.Allow(t.Context(), c))
	}
	began := time.Now()
	require.ErrorIs(t, p.Allow(t.Context(), c), budget.ErrExceeded)
	w.Each(func(*pgtest.Flush) {})
	require.ErrorIs(t, p.Allow(t.Context(), c), budget.ErrExceeded)
	asked := slices.ContainsFunc(w.Sent(), func(x *pgtest.Flush) bool { return x.Has("metered.charge(") })
	require.True(t, !asked || time.Since(began) > remembered)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
		_, err := f.ledger.Credit(t.Context(), tx, budget.Credit{Scope: "hot", Amount: 5})
		return err
	}))
	pgtest.WaitFor(t, "the refusal to be forgotten", func() bool {
		err := p.Allow(t.Context(), c)
		if err != nil {
			require.ErrorIs(t, err, budget.ErrExceeded)
		}
		return err == nil
	})
	require.GreaterOrEqual(t, time.Since(began), remembered, "from memory until then")
}

// Units that another process leases come soon to a charge that needs them, in each scope. Until then its refusal says
// that they are leased, and when the last lease ends.
func TestRecall_UnitsOfOtherProcessesComeSoon(t *testing.T) {
	t.Parallel()
	for _, use := range []string{"charge", "allow"} {
		t.Run(use, func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			rule := leases.Rule{Share: 1, MinSlice: 1000, TTL: time.Hour, Idle: time.Hour}
			has, wants := f.pool(rule), f.pool(leases.Rule{})
			limit := budget.Lifetime(1000)
			scopes := []string{"one", "two", "three"}
			ask := func(p *leases.Pool, scope string, amount int64) error {
				c := budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{limit}}
				if use == "allow" {
					return p.Allow(t.Context(), c)
				}
				_, err := f.spend(p, pgx.ReadCommitted, c)
				return err
			}
			spent := map[string]int64{}
			for _, scope := range scopes {
				// A lease of 1000, and of the rest charges until it is there. What is left then is less than 500.
				_, err := f.db.Exec(t.Context(), `select metered.credit($1, null, 400, false, 1000, null, false)`, scope)
				require.NoError(t, err)
				pgtest.WaitFor(t, "a lease", func() bool {
					require.NoError(t, ask(has, scope, 1))
					spent[scope]++
					return f.usage(scope).Leased > 0
				})
			}
			pgtest.WaitFor(t, "it to listen", func() bool {
				return pgtest.Value[bool](t, f.db, `select exists (select from pg_stat_activity where datname = current_database() and state = 'idle' and query like 'listen %')`)
			})
			for _, scope := range scopes {
				err := ask(wants, scope, 500)
				var refused *budget.ExceededError
				require.ErrorAs(t, err, &refused)
				r := refused.Refusals[0]
				require.Positive(t, r.Leased)
				require.Zero(t, r.Held)
				require.Greater(t, r.RetryAfter, 30*time.Minute)
				require.LessOrEqual(t, r.RetryAfter, time.Hour)
			}
			for _, scope := range scopes {
				pgtest.WaitFor(t, "the units, long before the lease ends", func() bool { return f.usage(scope).Leased == 0 })
				pgtest.WaitFor(t, "them to be charged", func() bool { return ask(wants, scope, 500) == nil })
			}
			require.NoError(t, errors.Join(has.Close(t.Context()), wants.Close(t.Context())))
			for _, scope := range scopes {
				require.Equal(t, spent[scope]+500, f.settled(scope))
			}
		})
	}
}

// The units of a process that is gone are there when its lease has ended, for a charge that is refused for want of them:
// also without recalls, and in a process that never had a lease.
func TestRecall_UnitsOfADeadProcessAreThereAtTheEnd(t *testing.T) {
	t.Parallel()
	for _, use := range []string{"charge", "allow"} {
		t.Run(use, func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
			dead := f.open("rows", 100, 10*time.Second)
			require.NoError(t, dead.spend(t.Context(), f.db, 0, 1))
			p, _ := f.tapped(leases.Rule{RememberRefusal: 20 * time.Millisecond}, true)
			ask := func() error {
				if use == "allow" {
					return p.Allow(t.Context(), charge(1, budget.Lifetime(100)))
				}
				_, err := f.spend(p, pgx.ReadCommitted, charge(1, budget.Lifetime(100)))
				return err
			}
			var refused *budget.ExceededError
			require.ErrorAs(t, ask(), &refused)
			require.Equal(t, 10*time.Second, refused.RetryAfter())
			clock.Advance(10 * time.Second)
			pgtest.WaitFor(t, "the end of the lease", func() bool { return ask() == nil })
			require.Equal(t, int64(2), f.settled("hot", p))
		})
	}
}

// Units that another cluster has are not there when their lease has ended, until somebody settles it. Meanwhile a refusal has a time to
// wait, and a flood of them is answered from memory.
func TestAllow_AnEndedLeaseThatNobodySettlesHasARetryTime(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	f.open("rows", 100, 10*time.Second)
	_, err := f.db.Exec(t.Context(), `update metered.leases set mode = 'r', child = 'away'`)
	require.NoError(t, err)
	clock.Advance(time.Hour)
	p, w := f.tapped(leases.Rule{RememberRefusal: time.Minute}, true)
	limit := budget.Lifetime(100)
	w.Each(func(*pgtest.Flush) {})
	for range 1000 {
		var refused *budget.ExceededError
		require.ErrorAs(t, p.Allow(t.Context(), charge(1, limit)), &refused)
		require.Positive(t, refused.RetryAfter())
		require.LessOrEqual(t, refused.RetryAfter(), 2*time.Second)
	}
	calls := 0
	for _, x := range w.Sent() {
		if x.Has("metered.charge(") {
			calls++
		}
	}
	require.LessOrEqual(t, calls, 10)
	u, err := f.ledger.Usage(t.Context(), f.db, budget.Query{Scope: "hot"})
	require.NoError(t, err)
	require.EqualValues(t, 100, u[0].Leased)
}

// A refund ends a refusal by a period within seconds.
func TestAllow_ARefundEndsARefusalByAPeriod(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p, _ := f.tapped(leases.Rule{}, true)
	c := charge(1, budget.PerPeriod(10, 1000*time.Hour, time.Now()))
	receipt, err := f.charged(charge(10))
	require.NoError(t, err)
	var refused *budget.ExceededError
	require.ErrorAs(t, p.Allow(t.Context(), c), &refused)
	require.Greater(t, refused.RetryAfter(), 900*time.Hour)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
		_, err := f.ledger.Refund(t.Context(), tx, budget.Refund{Scope: "hot", Seq: receipt.Entries[0].Seq, All: true})
		return err
	}))
	pgtest.WaitFor(t, "the refund to be seen", func() bool { return p.Allow(t.Context(), c) == nil })
}

func (f *fixture) charged(c budget.Charge) (r budget.Receipt, err error) {
	err = pgx.BeginFunc(f.Context(), f.db, func(tx pgx.Tx) error {
		r, err = f.ledger.Charge(f.Context(), tx, c)
		return err
	})
	return r, err
}

// A flood of charges that a window refuses costs the database nothing for a moment.
func TestCharge_RepeatsARefusalByAWindow(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p := f.pool(leases.Rule{})
	limit := budget.PerWindow(3, time.Hour)
	_, err := f.spend(p, pgx.ReadCommitted, charge(3, limit))
	require.NoError(t, err)
	db, w := pgtest.Tap(t, f.db, nil)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = p.Charge(t.Context(), tx, charge(2, limit))
	require.ErrorIs(t, err, budget.ErrExceeded)
	asked := time.Now()
	w.Each(nil)
	for range 100 {
		var refused *budget.ExceededError
		_, err = p.Charge(t.Context(), tx, charge(2, limit))
		require.ErrorAs(t, err, &refused)
		require.InDelta(t, time.Hour, refused.RetryAfter(), float64(time.Minute))
	}
	require.True(t, len(w.Sent()) == 0 || time.Since(asked) > time.Second)

	// Credit is asked from the ledger: this very transaction may have made room.
	c := budget.Charge{Scope: "credit", Amount: 1, Limits: []budget.Limit{budget.Prepaid(0)}}
	_, err = p.Charge(t.Context(), tx, c)
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = f.ledger.Credit(t.Context(), tx, budget.Credit{Scope: "credit", Amount: 1})
	require.NoError(t, err)
	_, err = p.Charge(t.Context(), tx, c)
	require.NoError(t, err)
}

package leases_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/leases"
)

// A scope that is retired ends its leases: no unit is spent after it, at any isolation level, also while spends run.
func TestRetire_EndsTheLeasesOfItsScope(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			in := func(g func(tx pgx.Tx) error) error { return pgx.BeginFunc(f.Context(), f.db, g) }
			require.NoError(t, in(func(tx pgx.Tx) error { _, err := f.ledger.Create(f.Context(), tx, "hot"); return err }))
			p := f.pool(leases.Rule{MinSlice: 1000})
			c := charge(1, budget.Lifetime(1<<40))
			c.MustExist = true
			f.warm(p, c)
			var spending sync.WaitGroup
			for range 4 {
				spending.Go(func() {
					for {
						if _, err := f.spend(p, level, c); err != nil {
							if sqlstate.Collided(err) {
								continue
							}
							if !errors.Is(err, budget.ErrScopeRetired) {
								t.Error(err)
							}
							return
						}
					}
				})
			}
			for {
				err := in(func(tx pgx.Tx) error { _, err := f.ledger.Retire(f.Context(), tx, "hot"); return err })
				if !errors.Is(err, budget.ErrSerialization) {
					require.NoError(t, err)
					break
				}
			}
			spending.Wait()
			var late int
			require.NoError(t, f.db.QueryRow(f.Context(), `select count(*) from metered.lease_spends s, metered.resources r where s.at > r.retired_at`).Scan(&late))
			require.Zero(t, late)
		})
	}
}

// A retirement, or the end of a child, recalls what processes spend from memory: Allow lets nothing in long before the slice ends.
func TestRetire_RecallsWhatAllowHasInMemory(t *testing.T) {
	t.Parallel()
	for ended, end := range map[string]func(f *carving) error{
		"retired": func(f *carving) error {
			return f.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := f.ledger.Retire(f.Context(), tx, "hot"); return err })
		},
		"closed": func(f *carving) error { _, err := f.close(pgx.ReadCommitted, "hot"); return err },
	} {
		t.Run(ended, func(t *testing.T) {
			t.Parallel()
			f := carver(t, 1<<50)
			limit := budget.Lifetime(1 << 40)
			if ended == "closed" {
				limit = budget.Prepaid(0)
				_, err := f.carve(pgx.ReadCommitted, "hot", "user", 1<<40)
				require.NoError(t, err)
			} else {
				require.NoError(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := f.ledger.Create(f.Context(), tx, "hot"); return err }))
			}
			p := f.pool(leases.Rule{MinSlice: 1 << 30, TTL: time.Hour, Idle: time.Hour})
			c := charge(1, limit)
			c.MustExist = ended == "retired"
			f.warmAllow(p, c)
			pgtest.WaitFor(t, "it to listen", func() bool {
				return pgtest.Value[bool](t, f.db, `select exists (select from pg_stat_activity where datname = current_database() and state = 'idle' and query like 'listen %')`)
			})
			require.NoError(t, end(f))
			var err error
			pgtest.WaitFor(t, "a refusal", func() bool { err = p.Allow(t.Context(), c); return err != nil })
			require.ErrorIs(t, err, map[string]error{"retired": budget.ErrScopeRetired, "closed": budget.ErrScopeClosed}[ended])
			require.NoError(t, p.Close(t.Context()))
			f.verified()
		})
	}
}

// A recall reaches a slice that is on its way, too: its lease is open, and the answer is not there yet.
func TestRecall_ReachesASliceOnItsWay(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	var err error
	f.ledger, err = budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	p := f.pool(leases.Rule{MinSlice: 1 << 30, TTL: time.Hour, Idle: time.Hour})
	c := charge(1, budget.Lifetime(1<<40))
	other := c
	other.Scope = "other"
	f.warmAllow(p, other)
	pgtest.WaitFor(t, "it to listen", func() bool {
		return pgtest.Value[bool](t, f.db, `select exists (select from pg_stat_activity where datname = current_database() and state = 'idle' and query like 'listen %')`)
	})
	require.NoError(t, p.Allow(t.Context(), c)) // by the ledger. The next one asks for a slice
	holder := f.begin(pgx.ReadCommitted)
	_, err = holder.Exec(t.Context(), `select pg_advisory_xact_lock($1)`, f.ledger.LockKey("hot"))
	require.NoError(t, err)
	allowed := pgtest.Going(func() error { return p.Allow(t.Context(), c) })
	pgtest.WaitQueued(t, f.db, 1)
	_, err = f.db.Exec(t.Context(), `select pg_notify('metered_leases_metered', s) from unnest(array['hot', 'other']) s`)
	require.NoError(t, err)
	pgtest.WaitFor(t, "the notices", func() bool { return f.usage("other").Leased == 0 })
	require.NoError(t, holder.Rollback(t.Context()))
	require.NoError(t, <-allowed)
	pgtest.WaitFor(t, "the slice to be given back", func() bool { // a charge that comes later than recallPause asks for the next one
		return pgtest.Value[bool](t, f.db, `select exists (select from metered.leases where scope = 'hot' and settled_at is not null)`)
	})
	require.NoError(t, p.Close(t.Context()))
	require.Equal(t, int64(2), f.usage("hot").Spent)
}

// Where each write needs an actor, slices are opened all the same, in the name of their process, and a charge without an actor is refused.
func TestCharge_WhereAnActorIsRequired(t *testing.T) {
	t.Parallel()
	db := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{RequireActor: true})
	require.NoError(t, err)
	f := &fixture{t, db, ledger}
	p, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{}}, Owner: "process"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	c := charge(1, budget.Lifetime(1<<40))
	c.Note.Actor = "ann"
	f.warm(p, c)
	_, err = f.spend(p, pgx.ReadCommitted, charge(1, budget.Lifetime(1<<40)))
	require.ErrorIs(t, err, budget.ErrArgument)
	require.NoError(t, p.Allow(t.Context(), charge(1, budget.Lifetime(1<<30))), "the process is the actor")
}

// The answer of a database that was asked is not "unavailable".
func TestAllow_AClockThatIsBehindIsNoUnreachableDatabase(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	c := charge(1, budget.PerWindow(100, time.Hour))
	pgtest.SetClock(t, f.db, time.Now().Add(time.Hour))
	require.NoError(t, pgx.BeginFunc(f.Context(), f.db, func(tx pgx.Tx) error { _, err := f.ledger.Charge(f.Context(), tx, c); return err }))
	pgtest.SetClock(t, f.db, time.Now())
	p := f.pool(leases.Rule{})
	for range 5 {
		err := p.Allow(f.Context(), c)
		require.ErrorIs(t, err, budget.ErrClock)
		require.NotErrorIs(t, err, leases.ErrUnavailable)
	}
}

// A scope with as much credit as fits can be leased.
func TestCharge_OfAVeryGreatCredit(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	_, err := f.db.Exec(t.Context(), `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, others)
		values (1, 1, clock_timestamp(), 0, 0, $1, 0, 0, 'd', 'hot', 1)`, int64(math.MaxInt64-1))
	require.NoError(t, err)
	p := f.pool(leases.Rule{})
	f.warm(p, charge(1, budget.Prepaid(1<<50)))
}

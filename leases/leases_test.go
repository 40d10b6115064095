package leases_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

type fixture struct {
	*testing.T
	db     *pgxpool.Pool
	ledger *budget.Ledger
}

func setUp(t *testing.T) *fixture {
	db := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	return &fixture{t, db, ledger}
}

// pool returns a Pool that is closed with the test.
func (f *fixture) pool(rule leases.Rule) *leases.Pool {
	f.Helper()
	p, err := leases.New(f.db, f.ledger, leases.Config{Rules: []leases.Rule{rule}, OnError: func(err error) { f.Log(err) }})
	require.NoError(f, err)
	f.Cleanup(func() { _ = p.Close(context.Background()) })
	return p
}

func charge(amount int64, limits ...budget.Limit) budget.Charge {
	return budget.Charge{Scope: "hot", Amount: amount, Limits: limits}
}

// spend charges from p in a transaction of its own, again where it met others.
func (f *fixture) spend(p *leases.Pool, level pgx.TxIsoLevel, c budget.Charge) (budget.Receipt, error) {
	for {
		var r budget.Receipt
		err := pgx.BeginTxFunc(f.Context(), f.db, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) (err error) {
			r, err = p.Charge(f.Context(), tx, c)
			return err
		})
		if !errors.Is(err, budget.ErrSerialization) {
			return r, err
		}
	}
}

// warm charges until a lease is there.
func (f *fixture) warm(p *leases.Pool, c budget.Charge) (spent int64) {
	pgtest.WaitFor(f, "a lease", func() bool {
		r, err := f.spend(p, pgx.ReadCommitted, c)
		require.NoError(f, err)
		spent += c.Amount
		return r.Entries[0].Lease != 0
	})
	return spent
}

func (f *fixture) usage(scope string) budget.Usage {
	u, err := f.ledger.Usage(f.Context(), f.db, budget.Query{Scope: scope})
	require.NoError(f, err)
	return u[0]
}

// settled closes the pools and returns the units that the scope has spent, all of them in the chain.
func (f *fixture) settled(scope string, pools ...*leases.Pool) int64 {
	for _, p := range pools {
		require.NoError(f, p.Close(f.Context()))
	}
	u := f.usage(scope)
	require.Zero(f, u.Held+u.Leased, "nothing is held when all leases are settled")
	report, err := f.ledger.Verify(f.Context(), f.db, budget.VerifyOptions{})
	require.NoError(f, err)
	require.Empty(f, report.Differences)
	return u.Spent
}

func TestCharge_SpendsFromALease(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p := f.pool(patient)
	limit := budget.Lifetime(100_000)
	spent := f.warm(p, charge(5, limit))
	r, err := f.spend(p, pgx.ReadCommitted, charge(7, limit))
	require.NoError(t, err)
	spent += 7
	require.NotZero(t, r.Entries[0].Lease)
	require.Zero(t, r.Entries[0].Seq)
	require.Empty(t, r.Entries[0].Standings)
	require.WithinDuration(t, time.Now(), r.Entries[0].At, time.Minute)

	// Usage is true while the lease is open.
	u := f.usage("hot")
	require.Equal(t, spent, u.Used)
	require.Equal(t, spent, u.Spent)
	require.Positive(t, u.Leased)
	require.Zero(t, u.Held)
	require.Equal(t, 100_000-spent-u.Leased, u.Available(limit.Max))

	var all []leases.Lease
	for l, err := range p.History(t.Context(), f.db, "hot") {
		require.NoError(t, err)
		all = append(all, l)
	}
	require.Zero(t, all[len(all)-1].SettledAt)
	require.Equal(t, spent, f.settled("hot", p))
}

// With several processes, at each level, every committed unit is in the chain at the end, and never more than the limit.
// The short form finds a spend while its lease is settled.
func TestCharge_IsExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			limit := budget.Lifetime(pgtest.Size[int64](1000, 4000))
			pools := []*leases.Pool{f.pool(leases.Rule{Share: 4, Idle: 50 * time.Millisecond}), f.pool(leases.Rule{Share: 4, Idle: 50 * time.Millisecond})}
			var spent, refused, leased atomic.Int64
			var all sync.WaitGroup
			for g := range 8 {
				all.Go(func() {
					for i := range pgtest.Size(80, 300) {
						amount := int64(1 + (g+i)%5)
						tx, err := f.db.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
						if err != nil {
							t.Error(err)
							return
						}
						r, err := pools[g%2].Charge(t.Context(), tx, charge(amount, limit))
						switch {
						case err != nil || i%7 == 0:
							_ = tx.Rollback(t.Context())
						default:
							err = tx.Commit(t.Context())
							if err == nil {
								spent.Add(amount)
								if r.Entries[0].Lease != 0 {
									leased.Add(1)
								}
							}
						}
						if errors.Is(err, budget.ErrExceeded) {
							refused.Add(1)
						} else if err != nil && !errors.Is(err, budget.ErrSerialization) && !collided(err) {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			t.Logf("spent %d, of which %d times from leases, refused %d", spent.Load(), leased.Load(), refused.Load())
			require.Positive(t, leased.Load())
			require.Equal(t, spent.Load(), f.settled("hot", pools...))
			require.LessOrEqual(t, spent.Load(), limit.Max)
		})
	}
}

func collided(err error) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && state.SQLState() == "40001"
}

func TestCharge_NearTheEndIsExact(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	limit := budget.Lifetime(600)
	pools := []*leases.Pool{f.pool(leases.Rule{}), f.pool(leases.Rule{}), f.pool(leases.Rule{}), f.pool(leases.Rule{})}
	spent := int64(0)
	deadline := pgtest.Patience(t)
	for i := 0; spent < limit.Max && time.Now().Before(deadline); i++ {
		_, err := f.spend(pools[i%4], pgx.ReadCommitted, charge(1, limit))
		var refused *budget.ExceededError
		switch {
		case err == nil:
			spent++
		case errors.As(err, &refused):
			require.Positive(t, refused.Refusals[0].Leased, "refused only because units are leased: %v", err)
			require.Less(t, refused.RetryAfter(), 11*time.Second)
			time.Sleep(5 * time.Millisecond) // a client's pause: other pools give their slices back
		default:
			require.NoError(t, err)
		}
	}
	require.Equal(t, limit.Max, spent, "all of it can be spent")
	_, err := f.spend(pools[0], pgx.ReadCommitted, charge(1, limit))
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, limit.Max, f.settled("hot", pools...))
}

func TestAllow_IsExactAndRefusesFromMemory(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t)
	limit := budget.PerWindow(pgtest.Sizes[int64](300, 1500, 5000), time.Hour)
	pools := []*leases.Pool{f.pool(leases.Rule{}), f.pool(leases.Rule{})}
	var allowed atomic.Int64
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for range limit.Max {
				err := pools[g%2].Allow(t.Context(), charge(1, limit))
				var refused *budget.ExceededError
				switch {
				case err == nil:
					allowed.Add(1)
				case errors.As(err, &refused):
					if refused.Refusals[0].Leased > 0 {
						time.Sleep(time.Millisecond) // a client's pause, as above
					}
				default:
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.LessOrEqual(t, allowed.Load(), limit.Max)
	require.Equal(t, allowed.Load(), f.settled("hot", pools...))
	t.Logf("allowed %d", allowed.Load())
}

func TestAllow_UnusedUnitsComeBackWhenIdle(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	p := f.pool(leases.Rule{Idle: 20 * time.Millisecond})
	for range 50 {
		require.NoError(t, p.Allow(t.Context(), charge(1, budget.Lifetime(1000))))
	}
	pgtest.WaitFor(t, "the slice to be given back", func() bool { u := f.usage("hot"); return u.Leased == 0 && u.Spent == 50 })
}

func TestAllow_ADeadProcessHasSpentAllOfItsSlice(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	dead, w := f.tapped(patient, true)
	f.warmAllow(dead, charge(1, budget.Lifetime(100_000)))
	w.Refuse(true)
	w.Each(func(x *pgtest.Flush) { x.Lose() })
	u := f.usage("hot")
	leased, spent := u.Leased, u.Spent
	report, err := leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Zero(t, report.Settled, "not before its end")
	clock.Advance(patient.TTL)
	report, err = leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Positive(t, report.Settled)
	u = f.usage("hot")
	require.Zero(t, u.Leased)
	require.Equal(t, spent+leased, u.Spent, "all of the slice counts as spent")
}

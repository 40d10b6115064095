package budget_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// each charges a batch in a transaction of its own.
func each(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, charges ...budget.Charge) ([]budget.Result, error) {
	return pgtest.InTx(ctx, pool, func(tx pgx.Tx) ([]budget.Result, error) { return l.ChargeEach(ctx, tx, charges...) })
}

func take(scope string, amount int64, limits ...budget.Limit) budget.Charge {
	return budget.Charge{Scope: scope, Amount: amount, Limits: limits}
}

func TestChargeEach_JudgesEachOnItsOwn(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	hour := budget.PerWindow(10, time.Hour)
	noted := take("b", 7)
	noted.Note = budget.Note{Actor: "ann", Reason: `"quoted", {and} (bracketed)`}
	strict := take("none", 1)
	strict.MustExist = true
	results, err := each(t.Context(), pool, l,
		take("a", 6, hour), take("a", 5, hour), take("b", 1), take("a", 4, hour, budget.Lifetime(100)), noted, strict, take("c", 1, budget.Lifetime(0)))
	require.NoError(t, err)
	require.Len(t, results, 7)

	require.Equal(t, budget.Posted{Scope: "a", Seq: 1, Amount: 6, At: start, Standings: []budget.Standing{{Limit: hour, Used: 6, Available: 4}}}, inUTC(results[0].Posted))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, results[1].Err, &exceeded)
	require.Equal(t, []budget.Refusal{{Scope: "a", Limit: hour, Used: 6, Requested: 5, Available: 4, RetryAfter: time.Hour}}, exceeded.Refusals)
	require.Equal(t, budget.Posted{Scope: "a", Seq: 2, Amount: 4, At: start, Standings: []budget.Standing{
		{Limit: hour, Used: 10}, {Limit: budget.Lifetime(100), Used: 10, Available: 90}}}, inUTC(results[3].Posted))
	require.Equal(t, []int64{1, 2}, []int64{results[2].Posted.Seq, results[4].Posted.Seq})
	require.ErrorIs(t, results[5].Err, budget.ErrScopeUnknown)
	require.ErrorIs(t, results[6].Err, budget.ErrExceeded)
	for entry, err := range l.Entries(t.Context(), pool, "b", budget.EntriesOptions{NewestFirst: true, Max: 1}) {
		require.NoError(t, err)
		require.Equal(t, noted.Note, entry.Note)
		require.EqualValues(t, 8, entry.Spent)
	}
	requireVerified(t, pool, l)
}

func inUTC(p budget.Posted) budget.Posted {
	p.At = p.At.UTC()
	return p
}

// An error with which Charge would fail is the answer of its own charge alone.
func TestChargeEach_AFailureIsOfItsChargeAlone(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	clock.Advance(time.Hour)
	mustCharge(t, pool, l, "ahead", 1)
	clock.Advance(-time.Hour)
	for range 40 {
		mustCharge(t, pool, l, "purged", 1)
	}
	clock.Advance(100 * time.Hour)
	purge(t, pool, l, time.Hour)
	clock.Advance(-100 * time.Hour)
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		values (1, 1, '2025-01-01', 9223372036854775806, 0, 0, 0, 0, 'c', 'full')`)
	minute := budget.PerWindow(100, time.Minute)
	charges := []budget.Charge{take("ahead", 1, minute), take("a", 1, minute), take("purged", 1, budget.PerWindow(100, 1000*time.Hour)), take("full", 2), take("a", 2, minute)}
	results, err := each(t.Context(), pool, l, charges...)
	require.NoError(t, err)
	require.ErrorIs(t, results[0].Err, budget.ErrClock)
	require.ErrorContains(t, results[0].Err, `scope "ahead" by 1h0m0s`)
	require.ErrorIs(t, results[2].Err, budget.ErrWindowPurged)
	require.ErrorIs(t, results[3].Err, fault.New("budget_overflow", ""))
	for i, want := range map[int]int64{1: 1, 4: 3} {
		require.NoError(t, results[i].Err)
		require.Equal(t, want, results[i].Posted.Standings[0].Used)
	}
	for _, c := range charges {
		results, err := each(t.Context(), pool, l, c) // alone, too
		require.NoError(t, err)
		_, alone := charge(t.Context(), pool, l, c.Scope, c.Amount, c.Limits...)
		require.Equal(t, metered.Code(alone), metered.Code(results[0].Err), "%s", c.Scope)
	}
}

func TestChargeEach_RefusesArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	for field, charges := range map[string][]budget.Charge{
		"charges":                      nil,
		"charges[1].Scope":             {take("a", 1), take("", 1)},
		"charges[0].Amount":            {take("a", 0)},
		"charges[1].Limits[0].Window":  {take("a", 1), take("a", 1, budget.Limit{Max: 1})},
		"charges[0].Limits[0].MaxFrom": {take("a", 1, budget.Lifetime(1).MaxFrom("select 1"))},
		"charges[0].Note.Actor":        {{Scope: "a", Amount: 1, Note: budget.Note{Actor: "\x00"}}},
	} {
		_, err := each(t.Context(), pool, l, charges...)
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument, field)
		require.Equal(t, field, argument.Field)
	}
	_, err := each(t.Context(), pool, l, make([]budget.Charge, bounds.MaxBatch+1)...)
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = l.ChargeEach(t.Context(), nil, take("a", 1))
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = new(budget.Ledger).ChargeEach(t.Context(), nil, take("a", 1))
	require.ErrorIs(t, err, budget.ErrArgument)
}

func count(t testing.TB, pool *pgxpool.Pool, from string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "select count(*) from "+from).Scan(&n))
	return n
}

// An old snapshot decides nothing, neither that a charge is let in nor that it is refused.
func TestChargeEach_AnOldSnapshotIsRetried(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	hour := budget.PerWindow(10, time.Hour)
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, meanwhile := range map[string]func(t *testing.T, free, full, fresh string){
			"a charge":       func(t *testing.T, free, _, _ string) { mustCharge(t, pool, l, free, 1) },
			"a first charge": func(t *testing.T, _, _, fresh string) { mustCharge(t, pool, l, fresh, 1) },
			"a refund of the units that refuse": func(t *testing.T, _, full, _ string) {
				require.NoError(t, refund(t.Context(), pool, l, full, 1, 5))
			},
			"a purge and a charge": func(t *testing.T, free, _, _ string) {
				chargeMany(t, pool, l, free, 20)
				clock.Advance(24 * time.Hour)
				chargeMany(t, pool, l, free, 20)
				purge(t, pool, l, time.Hour)
			},
		} {
			t.Run(fmt.Sprint(iso, " ", name), func(t *testing.T) {
				free, full, fresh := t.Name()+"free", t.Name()+"full", t.Name()+"new"
				mustCharge(t, pool, l, free, 1)
				mustCharge(t, pool, l, full, 10)
				tx := begin(t, pool, iso)
				_, err := tx.Exec(t.Context(), "select count(*) from metered.ledger") // the snapshot
				require.NoError(t, err)
				meanwhile(t, free, full, fresh)
				_, err = l.ChargeEach(t.Context(), tx, take(free, 1, hour), take(full, 1, hour), take(fresh, 1, hour), take(free, 1, hour))
				require.Equal(t, sqlstate.SerializationFailure, code(err), "%v", err)
				require.ErrorIs(t, err, budget.ErrSerialization)
			})
		}
	}
}

// Batches, single charges and refunds meet on few scopes: exactly as much is let in as there is, with the locks and
// by the guard alone. The short form finds a batch that does not collide (_write_plain without _collided).
func TestChargeEach_ConcurrentBatchesNeverExceedTheLimit(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, locked := range []bool{true, false} {
		pool, l, _ := open(t)
		if !locked {
			withoutLocks(t, pool)
		}
		for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(fmt.Sprint(iso, " locked ", locked), func(t *testing.T) {
				const scopes, most = 5, 60
				name := func(i int) string { return fmt.Sprint(iso, i) }
				limits := []budget.Limit{budget.PerWindow(most, time.Hour), budget.Lifetime(most)}
				var made [scopes]atomic.Int64
				var g errgroup.Group
				for range pgtest.Size(4, 6) {
					g.Go(func() error {
						for full := 0; full < 3; {
							charges := make([]budget.Charge, 1+pgtest.Random(t).IntN(12))
							which := make([]int, len(charges))
							for i := range charges {
								which[i] = pgtest.Random(t).IntN(scopes)
								charges[i] = take(name(which[i]), 1+pgtest.Random(t).Int64N(3), limits...)
							}
							tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: iso})
							if err != nil {
								return err
							}
							results, err := l.ChargeEach(t.Context(), tx, charges...)
							if err == nil {
								err = tx.Commit(t.Context())
							}
							_ = tx.Rollback(context.WithoutCancel(t.Context()))
							if errors.Is(err, budget.ErrSerialization) || code(err) == sqlstate.SerializationFailure {
								continue
							} else if err != nil {
								return err
							}
							any := false
							for i, r := range results {
								if r.Err == nil {
									made[which[i]].Add(r.Posted.Amount)
									any = true
								} else if !errors.Is(r.Err, budget.ErrExceeded) {
									return r.Err
								}
							}
							if !any {
								full++
							}
						}
						return nil
					})
				}
				require.NoError(t, g.Wait())
				for i := range scopes {
					u := usage(t, pool, l, name(i), time.Hour)
					require.Equal(t, made[i].Load(), u.Used)
					require.LessOrEqual(t, u.Used, int64(most))
					if rest := most - u.Used; rest > 0 { // the last batches may have asked for less
						_, err := charge(t.Context(), pool, l, u.Scope, rest, limits...)
						require.NoError(t, err)
					}
					_, err := charge(t.Context(), pool, l, u.Scope, 1, limits...)
					require.ErrorIs(t, err, budget.ErrExceeded)
				}
			})
		}
		requireVerified(t, pool, l)
	}
}

// A charge that waited for a lock is dated when it got the lock: it must not leave its window early.
func TestChargeEach_IsDatedAfterItsWait(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	holder := begin(t, pool, "")
	require.NoError(t, l.Lock(t.Context(), holder, "b"))
	var results []budget.Result
	done := pgtest.Going(func() (err error) {
		results, err = each(t.Context(), pool, l, take("a", 1), take("b", 1), take("c", 1, budget.Lifetime(0)))
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	clock.Advance(time.Hour)
	require.NoError(t, holder.Rollback(t.Context()))
	require.NoError(t, <-done)
	for _, r := range results[:2] {
		require.Equal(t, start.Add(time.Hour), r.Posted.At.UTC())
	}
}

func TestChargeNow_IsOneRoundTripThatCommits(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, l, _ := open(t)
	tapped, wire := pgtest.Tap(t, pool, nil)
	c := take("a", 3, budget.Lifetime(5))
	posted, err := l.ChargeNow(t.Context(), tapped, c)
	require.NoError(t, err)
	require.EqualValues(t, 2, posted.Standings[0].Available)
	wire.Each(nil)
	_, err = l.ChargeNow(t.Context(), tapped, c)
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Len(t, wire.Sent(), 1)
	require.EqualValues(t, 3, usage(t, pool, l, "a", 0).Used)
	_, err = l.ChargeNow(t.Context(), tapped, take("a", 1, budget.Lifetime(1).MaxFrom("select 1")))
	require.ErrorIs(t, err, budget.ErrArgument)

	wire.Once(func(f *pgtest.Flush) bool { return f.Has(".charge_plain(") }, (*pgtest.Flush).LoseAnswer)
	_, err = l.ChargeNow(t.Context(), tapped, take("a", 1))
	require.ErrorIs(t, err, budget.ErrCommitUnknown)
	require.ErrorIs(t, err, budget.ErrCommitUnknown)
	require.EqualValues(t, 4, usage(t, pool, l, "a", 0).Used, "it was committed")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.ChargeNow(ctx, tapped, c)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, budget.ErrCommitUnknown)
}

func TestChargeEach_AWindowThatBeginsBeforeAClockRepair(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	mustCharge(t, pool, l, "a", 5)
	clock.Advance(2 * time.Hour)
	mustCharge(t, pool, l, "a", 3)
	clock.Advance(-time.Hour)
	r, err := repairClock(t.Context(), pool, l, "a")
	require.NoError(t, err)
	require.True(t, r.Repaired)
	clock.Advance(30 * time.Minute)
	results, err := each(t.Context(), pool, l, take("a", 1, budget.PerWindow(100, time.Hour)), take("b", 1))
	require.NoError(t, err)
	require.EqualValues(t, 4, results[0].Posted.Standings[0].Used)
}

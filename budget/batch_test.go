package budget_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
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

// What a call of Charge would fail with is the answer of its charge alone.
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
	var ahead *budget.ClockError
	require.ErrorAs(t, results[0].Err, &ahead)
	require.Equal(t, "ahead", ahead.Scope)
	require.Equal(t, time.Hour, ahead.Ahead)
	require.ErrorIs(t, results[2].Err, budget.ErrWindowPurged)
	require.ErrorIs(t, results[3].Err, budget.ErrOverflow)
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
	_, err := each(t.Context(), pool, l, make([]budget.Charge, budget.MaxBatch+1)...)
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = l.ChargeEach(t.Context(), nil, take("a", 1))
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = new(budget.Ledger).ChargeEach(t.Context(), nil, take("a", 1))
	require.ErrorIs(t, err, budget.ErrArgument)
}

// The oracle: in the same state, a batch answers and writes what its charges do one by one, whatever came before:
// holds that are due, refunds, credits, purges, clocks that were set and repaired.
func TestChargeEach_IsAsOneByOne(t *testing.T) {
	t.Parallel()
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			o := newOracle(t)
			for range 120 {
				o.history(4)
				o.compare(iso)
			}
			t.Logf("%d charges: %d made, refused or failed %v", o.made+o.refused(), o.made, o.codes)
			require.Greater(t, o.made, 500)
			for _, code := range []string{"budget_exceeded", "budget_clock", "budget_window_purged", "scope_unknown"} {
				require.NotZero(t, o.codes[code], code)
			}
			require.NotZero(t, count(t, o.pool, `metered.ledger where kind = 'x'`), "a batch must have met holds that were due")
			requireVerified(t, o.pool, o.l)
		})
	}
}

type oracle struct {
	*testing.T
	pool  *pgxpool.Pool
	l     *budget.Ledger
	book  *holds.Book
	clock *pgtest.Clock
	rand  *rand.Rand
	made  int
	codes map[string]int
}

func newOracle(t *testing.T) *oracle {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	o := &oracle{T: t, rand: rand.New(rand.NewPCG(seed, 0)), codes: map[string]int{}}
	o.pool, o.l, o.clock = open(t)
	var err error
	o.book, err = holds.New(o.l, holds.Config{})
	require.NoError(t, err)
	_, err = pgtest.InTx(t.Context(), o.pool, func(tx pgx.Tx) (any, error) { return o.l.Create(t.Context(), tx, "s0", "s1", "s2", "s3") })
	require.NoError(t, err)
	return o
}

func (o *oracle) refused() (n int) {
	for _, m := range o.codes {
		n += m
	}
	return n
}

func (o *oracle) scope() string { return fmt.Sprintf("s%d", o.rand.IntN(12)) }

// history lets things happen that a batch may meet.
func (o *oracle) history(acts int) {
	ctx := o.Context()
	for range acts {
		scope := o.scope()
		var err error
		switch o.rand.IntN(12) {
		case 0, 1:
			o.clock.Advance(time.Duration(o.rand.Int64N(int64(20 * time.Minute))))
		case 2:
			mustCredit(o, o.pool, o.l, scope, 1+o.rand.Int64N(20))
		case 3, 4:
			err = refund(ctx, o.pool, o.l, scope, 1+o.rand.Int64N(40), 1)
			for _, fine := range []error{budget.ErrUnknownEntry, budget.ErrEntryPurged, budget.ErrNotCharge, budget.ErrRefundExceeds} {
				if errors.Is(err, fine) {
					err = nil
				}
			}
		case 5, 6, 7:
			_, err = pgtest.InTx(ctx, o.pool, func(tx pgx.Tx) (holds.Hold, error) {
				return o.book.Place(ctx, tx, holds.Request{TTL: time.Second + time.Duration(o.rand.IntN(1_800_000))*time.Millisecond,
					Lines: []holds.Line{{Scope: scope, Amount: 1 + o.rand.Int64N(9)}, {Scope: scope + "'", Amount: 1}}})
			})
		case 8:
			if o.rand.IntN(4) == 0 {
				o.clock.Advance(-time.Duration(o.rand.Int64N(int64(3 * time.Minute))))
			}
		case 9:
			_, err = pgtest.InTx(ctx, o.pool, func(tx pgx.Tx) (budget.ClockRepair, error) {
				return o.l.RepairClock(ctx, tx, scope, budget.Note{})
			})
		case 10:
			if o.rand.IntN(6) == 0 {
				purge(o, o.pool, o.l, 2*time.Hour)
			}
		default:
			n := 1 + o.rand.IntN(20)
			chargeMany(o, o.pool, o.l, scope, n)
		}
		require.NoError(o, err)
	}
}

func (o *oracle) charges() []budget.Charge {
	charges := make([]budget.Charge, 1+o.rand.IntN(24))
	for i := range charges {
		c := budget.Charge{Scope: o.scope(), Amount: 1 + o.rand.Int64N(6), MustExist: o.rand.IntN(30) == 0, Note: budget.Note{Reason: fmt.Sprint("charge ", i)}}
		if o.rand.IntN(20) == 0 {
			c.Scope = fmt.Sprint("new ", o.rand.Int())
		}
		for range o.rand.IntN(3) {
			switch o.rand.IntN(4) {
			case 0:
				c.Limits = append(c.Limits, budget.Lifetime(o.rand.Int64N(2000)))
			case 1:
				c.Limits = append(c.Limits, budget.PerWindow(o.rand.Int64N(200), 5*time.Hour))
			default:
				c.Limits = append(c.Limits, budget.PerWindow(o.rand.Int64N(100), time.Duration(1+o.rand.IntN(60))*time.Minute))
			}
		}
		charges[i] = c
	}
	return charges
}

// wrote are the entries of the last epoch of work: those that a transaction sees beyond what is committed.
const wroteSQL = `select coalesce(jsonb_agg(to_jsonb(l) - 'next_due' order by l.scope, l.seq), '[]')::text from metered.ledger l
	where l.xmin::text::bigint >= (pg_current_xact_id_if_assigned()::text::bigint & 4294967295)`

func (o *oracle) compare(iso pgx.TxIsoLevel) {
	ctx := o.Context()
	tx, err := o.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: iso})
	require.NoError(o, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	charges := o.charges()
	_, err = tx.Exec(ctx, "select pg_current_xact_id(); savepoint one_by_one", pgx.QueryExecModeSimpleProtocol)
	require.NoError(o, err)
	want := make([]budget.Result, len(charges))
	for i, c := range charges {
		inner, err := tx.Begin(ctx)
		require.NoError(o, err)
		r, err := o.l.Charge(ctx, inner, c)
		if want[i].Err = err; err != nil {
			require.NoError(o, inner.Rollback(ctx))
			continue
		}
		require.NoError(o, inner.Commit(ctx))
		want[i].Posted = r.Entries[0]
	}
	var wantRows, rows string
	require.NoError(o, tx.QueryRow(ctx, wroteSQL).Scan(&wantRows))
	_, err = tx.Exec(ctx, "rollback to savepoint one_by_one")
	require.NoError(o, err)
	got, err := o.l.ChargeEach(ctx, tx, charges...)
	require.NoError(o, err)
	require.NoError(o, tx.QueryRow(ctx, wroteSQL).Scan(&rows))
	for i := range got {
		require.Equal(o, want[i].Posted, got[i].Posted, "%+v", charges[i])
		if want[i].Err == nil {
			require.NoError(o, got[i].Err, "%+v", charges[i])
			o.made++
			continue
		}
		require.Error(o, got[i].Err, "%+v", charges[i])
		code := metered.Code(want[i].Err)
		require.Equal(o, code, metered.Code(got[i].Err), "%v, and not %v", got[i].Err, want[i].Err)
		o.codes[code]++
		var exceeded *budget.ExceededError
		if errors.As(want[i].Err, &exceeded) {
			require.Equal(o, want[i].Err, got[i].Err)
		}
	}
	require.JSONEq(o, wantRows, rows)
	require.NoError(o, tx.Commit(ctx))
}

func count(t testing.TB, pool *pgxpool.Pool, from string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "select count(*) from "+from).Scan(&n))
	return n
}

// At an old snapshot neither what is let in nor what is refused may rest on what it shows.
func TestChargeEach_AnOldSnapshotIsRetried(t *testing.T) {
	t.Parallel()
	hour := budget.PerWindow(10, time.Hour)
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, meanwhile := range map[string]func(*testing.T, *pgxpool.Pool, *budget.Ledger, *pgtest.Clock){
			"a charge": func(t *testing.T, pool *pgxpool.Pool, l *budget.Ledger, _ *pgtest.Clock) {
				mustCharge(t, pool, l, "free", 1)
			},
			"a first charge": func(t *testing.T, pool *pgxpool.Pool, l *budget.Ledger, _ *pgtest.Clock) {
				mustCharge(t, pool, l, "new", 1)
			},
			"a refund of what refuses": func(t *testing.T, pool *pgxpool.Pool, l *budget.Ledger, _ *pgtest.Clock) {
				require.NoError(t, refund(t.Context(), pool, l, "full", 1, 5))
			},
			"a purge and a charge": func(t *testing.T, pool *pgxpool.Pool, l *budget.Ledger, clock *pgtest.Clock) {
				for range 20 {
					mustCharge(t, pool, l, "free", 1)
				}
				clock.Advance(24 * time.Hour)
				for range 20 {
					mustCharge(t, pool, l, "free", 1)
				}
				purge(t, pool, l, time.Hour)
			},
		} {
			t.Run(fmt.Sprint(iso, " ", name), func(t *testing.T) {
				t.Parallel()
				pool, l, clock := open(t)
				mustCharge(t, pool, l, "free", 1)
				mustCharge(t, pool, l, "full", 10)
				tx := begin(t, pool, iso)
				_, err := tx.Exec(t.Context(), "select count(*) from metered.ledger") // the snapshot
				require.NoError(t, err)
				meanwhile(t, pool, l, clock)
				_, err = l.ChargeEach(t.Context(), tx, take("free", 1, hour), take("full", 1, hour), take("new", 1, hour), take("free", 1, hour))
				require.Equal(t, sqlstate.SerializationFailure, code(err), "%v", err)
				require.ErrorIs(t, err, budget.ErrSerialization)
			})
		}
	}
}

// Batches, single charges and refunds meet on few scopes: exactly as much is let in as there is, with the locks and
// by the guard alone.
func TestChargeEach_ConcurrentBatchesNeverExceedTheLimit(t *testing.T) {
	t.Parallel()
	for _, locked := range []bool{true, false} {
		for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(fmt.Sprint(iso, " locked ", locked), func(t *testing.T) {
				t.Parallel()
				pool, l, _ := open(t)
				if !locked {
					withoutLocks(t, pool)
				}
				const scopes, most = 5, 60
				limits := []budget.Limit{budget.PerWindow(most, time.Hour), budget.Lifetime(most)}
				var made [scopes]atomic.Int64
				var g errgroup.Group
				for range 6 {
					g.Go(func() error {
						for full := 0; full < 3; {
							charges := make([]budget.Charge, 1+rand.IntN(12))
							which := make([]int, len(charges))
							for i := range charges {
								which[i] = rand.IntN(scopes)
								charges[i] = take(fmt.Sprint("s", which[i]), 1+rand.Int64N(3), limits...)
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
					u := usage(t, pool, l, fmt.Sprint("s", i), time.Hour)
					require.Equal(t, made[i].Load(), u.Used)
					require.LessOrEqual(t, u.Used, int64(most))
					require.Greater(t, u.Used, int64(most-3))
				}
				requireVerified(t, pool, l)
			})
		}
	}
}

func TestChargeNow_IsOneRoundTripThatCommits(t *testing.T) {
	t.Parallel()
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

	wire.Once(func(f *pgtest.Flush) bool { return f.Has(".charge(") }, (*pgtest.Flush).LoseAnswer)
	_, err = l.ChargeNow(t.Context(), tapped, take("a", 1))
	require.ErrorIs(t, err, budget.ErrCommitUnknown)
	require.ErrorIs(t, err, metered.ErrCommitUnknown)
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

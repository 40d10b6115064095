package holds_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
)

// level is the isolation of the n-th transaction of a test: one, or each in turn.
func level(name string, n int) pgx.TxIsoLevel {
	if name == "mixed" {
		return isolations[n%len(isolations)]
	}
	return pgx.TxIsoLevel(name)
}

var levels = []string{"read committed", "repeatable read", "serializable", "mixed"}

// More than twice as many callers want a unit as there are. Some give theirs back or capture it meanwhile. The short form finds an entry that does not
// collide (_collided without its error).
func TestPlace_ConcurrentCallersAreLetInExactly(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, locks := range []bool{true, false} {
		f := setUp(t, holds.Config{})
		if !locks { // the guard alone must do
			execute(t, f.pool, `create or replace function metered._lock_keys(keys bigint[], wait_ms int) returns boolean
				language plpgsql volatile as 'begin return false; end'`)
		}
		for _, name := range levels {
			t.Run(fmt.Sprintf("%s, locks %v", name, locks), func(t *testing.T) {
				workers, each, limit := pgtest.Size(4, 8), pgtest.Size(8, 12), pgtest.Size(int64(13), 40)
				room, house := "room "+name, "house "+name
				ctx := t.Context()
				retry := &retrier{pool: f.pool, deadlocks: !locks}
				var placed, refused, released, captured atomic.Int64
				var ready sync.WaitGroup
				ready.Add(workers)
				require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
					meet := sync.OnceFunc(func() { ready.Done(); ready.Wait() }) // all have a snapshot before the first of them places
					for n := range each {
						iso := level(name, worker+n)
						var h holds.Hold
						err := retry.run(ctx, iso, func(tx pgx.Tx) (err error) {
							if _, err := tx.Exec(ctx, "select 1"); err != nil { // the snapshot is older than the lock
								return err
							}
							meet()
							h, err = f.book.Place(ctx, tx, holds.Placement{TTL: time.Minute,
								Lines: []holds.Line{capacity(room, 1, limit), capacity(house, 1, 1000)}})
							return err
						})
						if errors.Is(err, budget.ErrExceeded) {
							refused.Add(1)
							continue
						}
						if err != nil {
							return err
						}
						placed.Add(1)
						err = retry.run(ctx, iso, func(tx pgx.Tx) (err error) {
							switch n % 4 {
							case 1:
								_, err = f.book.Release(ctx, tx, holds.Release{IDs: []string{h.ID}})
							case 2:
								_, err = f.book.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, All: true})
							}
							return err
						})
						switch {
						case err != nil:
							return err
						case n%4 == 1:
							released.Add(1)
						case n%4 == 2:
							captured.Add(1)
						}
					}
					return nil
				}))
				require.Equal(t, int64(workers*each), placed.Load()+refused.Load())
				used, held := f.usage(room)
				require.Equal(t, captured.Load(), used)
				require.Equal(t, placed.Load()-released.Load()-captured.Load(), held)
				require.LessOrEqual(t, used+held, limit)
				for range limit - used - held { // the rest can be had, and not a unit more
					f.mustPlace(holds.Placement{Lines: []holds.Line{capacity(room, 1, limit)}})
				}
				_, err := f.place(holds.Placement{Lines: []holds.Line{capacity(room, 1, limit)}})
				require.ErrorIs(t, err, budget.ErrExceeded)
				switch {
				case name != "read committed":
					require.Positive(t, retry.retries.Load(), "the guard was never needed: this test proves nothing")
				case locks:
					require.Zero(t, retry.retries.Load(), "at read committed writers queue and never fail")
				}
			})
		}
		f.verify()
	}
}

// Everybody at once, and the clock reaches the deadline meanwhile: one of them ends the hold, and the history names
// that one. The short form finds a call that does not look again after its wait (_lock_holds).
func TestEnd_OfARaceHasExactlyOneWinner(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, name := range levels {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			retry := &retrier{pool: f.pool}
			seat := "seat " + name
			won := map[holds.EventKind]int{}
			for round := range pgtest.Sizes(8, 14, 40) {
				h := f.mustPlace(holds.Placement{ID: fmt.Sprint(name, round), Lines: []holds.Line{capacity(seat, 1, 1), capacity("house", 1, 9999)}})
				var mu sync.Mutex
				winners := map[holds.EventKind]int{}
				var next string
				did := func(kind holds.EventKind, err error) error {
					switch {
					case err == nil:
						mu.Lock()
						winners[kind]++
						mu.Unlock()
					case !errors.Is(err, holds.ErrState) && !errors.Is(err, budget.ErrExceeded):
						return err
					}
					return nil
				}
				in := func(fn func(tx pgx.Tx) error) error { return retry.run(ctx, level(name, round), fn) }
				ids := []string{h.ID}
				calls := []func() error{
					func() error {
						return did(holds.EventCaptured, in(func(tx pgx.Tx) error {
							_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: ids, All: true})
							return err
						}))
					},
					func() error {
						return did(holds.EventCaptured, in(func(tx pgx.Tx) error {
							_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: ids, All: true})
							return err
						}))
					},
					func() error {
						return did(holds.EventReleased, in(func(tx pgx.Tx) error { _, err := f.book.Release(ctx, tx, holds.Release{IDs: ids}); return err }))
					},
					func() error {
						for range round % 4 { // or it would be the first, mostly
							if _, err := f.book.Get(ctx, f.pool, "", h.ID, ""); err != nil {
								return err
							}
						}
						f.clock.Set(h.Due)
						return nil
					},
					func() error {
						return in(func(tx pgx.Tx) error {
							_, _, err := f.book.Expire(ctx, tx, holds.Expire{ID: h.ID, Deadline: h.Deadline})
							return err
						})
					},
					func() error { _, err := f.book.Sweep(ctx, f.pool, holds.SweepOptions{}); return err },
					func() error {
						var got holds.Hold
						err := in(func(tx pgx.Tx) (err error) {
							got, err = f.book.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{capacity(seat, 1, 1)}})
							return err
						})
						next = got.ID
						return did(holds.EventPlaced, err)
					},
				}
				require.NoError(t, pgtest.InParallel(len(calls), func(i int) error { return calls[(i+round)%len(calls)]() }))
				var ends []holds.EventKind
				history, err := f.book.History(ctx, f.pool, "", h.ID, "")
				require.NoError(t, err)
				for _, e := range history[1:] {
					ends = append(ends, e.Kind)
				}
				if len(ends) == 0 { // the clock was the last
					ends = append(ends, holds.EventExpired)
				}
				require.Len(t, ends, 1)
				won[ends[0]]++
				for _, kind := range []holds.EventKind{holds.EventCaptured, holds.EventReleased} {
					require.Equal(t, ends[0] == kind, winners[kind] == 1, "%v ended as %v", winners, ends)
					require.LessOrEqual(t, winners[kind], 1)
				}
				require.False(t, ends[0] == holds.EventCaptured && next != "", "the unit was handed out twice")
				used, held := f.usage(seat)
				require.LessOrEqual(t, used+held, int64(1))
				f.sums()
				if ends[0] == holds.EventCaptured {
					_, err = do(f, refund(f, h.ID))
					require.NoError(t, err)
				}
				if next != "" {
					if _, err = f.release(next); err != nil { // it was placed before the clock moved
						require.ErrorIs(t, err, inState(holds.Expired))
					}
				}
			}
			t.Logf("%v", won)
			require.Greater(t, len(won), 1, "always the same winner")
		})
	}
	f.verify()
}

// Thousands of holds fall due on one scope, full until then, while many place on it
// and sweepers run: exactly as many units are let in as there is room for.
func TestPlace_AFloodOfDueHoldsLetsInExactlyTheCapacity(t *testing.T) {
	t.Parallel()
	const workers, amount = 6, 40
	due := pgtest.Size[int64](800, 3000)
	f := setUp(t, holds.Config{})
	ctx := t.Context()
	placeMany(f, int(due), time.Minute, "room")
	f.clock.Advance(time.Minute)
	retry := &retrier{pool: f.pool}
	var units atomic.Int64
	var swept atomic.Int64
	require.NoError(t, pgtest.InParallel(workers+2, func(worker int) error {
		if worker >= workers {
			report, err := f.book.Sweep(ctx, f.pool, holds.SweepOptions{Batch: 100})
			swept.Add(int64(report.Expired))
			return err
		}
		for n := 0; ; n++ {
			err := retry.run(ctx, level("mixed", worker+n), func(tx pgx.Tx) error {
				_, err := f.book.Place(ctx, tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{capacity("room", amount, due)}})
				return err
			})
			if errors.Is(err, budget.ErrExceeded) {
				return nil
			}
			if err != nil {
				return err
			}
			units.Add(amount)
		}
	}))
	require.Equal(t, due, units.Load())
	used, held := f.usage("room")
	require.Equal(t, []int64{0, due}, []int64{used, held})
	report, err := f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, due, swept.Load()+int64(report.Expired), "each is announced once")
	f.sums()
	r, err := f.ledger.Verify(ctx, f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, r.Differences)
}

// placeMany places holds of a unit on the scopes, in one round trip per hundred.
func placeMany(f *fixture, n int, ttl time.Duration, scopes ...string) (ids []string) {
	f.Helper()
	for n > 0 {
		batch := &pgx.Batch{}
		for range min(n, 100) {
			r := holds.Placement{ID: fmt.Sprintf("many/%v/%d", scopes, n-batch.Len()), TTL: ttl}
			for _, scope := range scopes {
				r.Lines = append(r.Lines, capacity(scope, 1, 1_000_000))
			}
			ids = append(ids, r.ID)
			p, err := placeHold(f.book, r)
			require.NoError(f, err)
			batch.Queue(p.SQL, p.Args(ledger.Sending{WaitMS: 5000})...)
		}
		n -= batch.Len()
		require.NoError(f, f.pool.SendBatch(context.Background(), batch).Close())
	}
	return ids
}

// Where many holds are due, a placement frees the sum of their units, and waits for the row of none:
// another transaction has locked one of them.
func TestPlace_ThatFreesManyHoldsWaitsForNone(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	const both, more = 2, 520
	line := func(scope string, n int64) holds.Line { return capacity(scope, n, 10*more) }
	f.mustPlace(holds.Placement{ID: "gate", TTL: 3 * time.Minute, Lines: []holds.Line{line("s", 1), line("u", 1)}})
	f.mustPlace(holds.Placement{ID: "last", TTL: 3 * time.Minute, Lines: []holds.Line{line("s", 1), line("t", 1)}})
	f.mustPlace(holds.Placement{ID: "shared", TTL: time.Minute, Lines: []holds.Line{line("s", 1), line("t", 1)}})
	placeMany(f, more, 2*time.Minute, "s")
	f.clock.Advance(time.Hour)
	wait := begin(t, f.pool, pgx.ReadCommitted)
	_, err := f.book.Place(t.Context(), wait, holds.Placement{ID: "ends gate", TTL: time.Minute, Lines: []holds.Line{line("u", 1)}})
	require.NoError(t, err)
	f.mustPlace(holds.Placement{ID: "all of s", Lines: []holds.Line{capacity("s", more, more)}})
	f.mustPlace(holds.Placement{ID: "all of t", Lines: []holds.Line{capacity("t", both, both)}})
	require.NoError(t, wait.Commit(t.Context()))
	// Let in for good: all holds that stood in the way have ended, and a clock that goes back does not bring them back.
	f.clock.Set(noon)
	_, held := f.usage("s")
	require.Equal(t, int64(more), held)
	f.verify()
}

// A call that waits for the row of a hold that another transaction is ending waits no longer than for a lock, or than
// its session's own setting allows. The session has that setting back afterwards.
func TestLockTimeout_BoundsTheWaitForAHoldsRow(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ctx := t.Context()
	ledger, book := f.ledger, f.book
	waiting := func(timeout time.Duration) {
		var err error
		ledger, err = budget.New(budget.Config{LockTimeout: timeout})
		require.NoError(t, err)
		book, err = holds.New(ledger, holds.Config{})
		require.NoError(t, err)
	}
	place := func(id string, scopes ...string) func(tx pgx.Tx) error {
		r := holds.Placement{ID: id, TTL: time.Minute}
		for _, scope := range scopes {
			r.Lines = append(r.Lines, capacity(scope, 1, 1))
		}
		return func(tx pgx.Tx) error { _, err := book.Place(ctx, tx, r); return err }
	}
	h := f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 1, 1), capacity("b", 1, 1)}})
	live := holds.Placement{ID: "live", TTL: time.Hour, Lines: []holds.Line{capacity("d", 1, 1)}}
	f.mustPlace(live)
	f.mustPlace(holds.Placement{ID: "too", TTL: time.Hour, Lines: []holds.Line{capacity("e", 1, 1)}})
	f.clock.Advance(time.Minute)
	row := func(id string) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select from metered.holds where id = $1 for update`, id)
			return err
		}
	}
	for name, c := range map[string]struct{ busy, call func(tx pgx.Tx) error }{
		"charge": {row("h"), func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "b", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
			return err
		}},
		"place":      {place("ends h", "a"), place("after h", "b")},
		"same":       {place("two places", "x"), place("two places", "y")},
		"same again": {row("live"), func(tx pgx.Tx) error { _, err := book.Place(ctx, tx, live); return err }},
		"release": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"live"}})
			return err
		}},
		"release two": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"live", "too"}})
			return err
		}},
		"extend": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Extend(ctx, tx, holds.Extend{IDs: []string{"live"}, By: time.Second})
			return err
		}},
		"expire": {row("h"), func(tx pgx.Tx) error {
			_, _, err := book.Expire(ctx, tx, holds.Expire{ID: "h", Deadline: h.Deadline})
			return err
		}},
	} {
		for own, timeout := range map[string]time.Duration{"0": 100 * time.Millisecond, "50ms": time.Hour} {
			waiting(timeout)
			busy, tx := begin(t, f.pool, pgx.ReadCommitted), begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, c.busy(busy), name)
			_, err := tx.Exec(ctx, `set local statement_timeout = '20s'; set local lock_timeout = '`+own+`'`)
			require.NoError(t, err)
			require.ErrorIs(t, c.call(tx), budget.ErrBusy, "%s, %s", name, own)
			require.NoError(t, busy.Rollback(ctx))
			require.NoError(t, tx.Rollback(ctx))
		}

		tx := begin(t, f.pool, pgx.ReadCommitted)
		_, err := tx.Exec(ctx, `set local lock_timeout = '7654ms'`)
		require.NoError(t, err)
		require.NoError(t, c.call(tx), name)
		var setting string
		require.NoError(t, tx.QueryRow(ctx, "show lock_timeout").Scan(&setting))
		require.Equal(t, "7654ms", setting, name)
		require.NoError(t, tx.Rollback(ctx))
	}
	f.verify()
}

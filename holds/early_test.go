package holds_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// One unit of each scope is handed on among holds of one or several, by a clock that goes forward and back. The next
// hold gets it when the last one is due, and not before. From then on the last one can do nothing more, whatever the
// clock says.
func TestExpiry_IsNeverEarlyAndNeverUndone(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MinTTL: time.Millisecond})
	serial := 0
	rapid.Check(t, func(rt *rapid.T) {
		serial++
		pick := func(label string, of ...int) int { return rapid.SampledFrom(of).Draw(rt, label) }
		now := noon
		f.clock.Set(now)
		scopes := []string{fmt.Sprint(serial, "/a"), fmt.Sprint(serial, "/b"), fmt.Sprint(serial, "/c")}
		has := map[string]holds.Hold{} // by scope: the hold that was let in last
		var lost []holds.Hold          // holds that lost a unit to another
		taken := map[string]bool{}     // by id: some of its units are another's
		for n := range pick("length", 8, 12, 16) {
			switch pick("act", 0, 0, 0, 1, 1, 2, 3) {
			case 0:
				r := holds.Placement{ID: fmt.Sprint(serial, "/", n), TTL: time.Duration(pick("ttl", 1, 2, 5, 60)) * time.Second, Grace: time.Duration(pick("grace", 0, 0, 1)) * time.Second}
				first := pick("scope", 0, 1, 2)
				wants := scopes[first:min(3, first+pick("scopes", 1, 2, 3))]
				for _, scope := range wants {
					r.Lines = append(r.Lines, capacity(scope, 1, 1))
				}
				h, err := f.place(r)
				free := !slices.ContainsFunc(wants, func(s string) bool { last, held := has[s]; return held && now.Before(last.Due) })
				require.Equal(rt, free, err == nil, "%v", err)
				if err != nil {
					require.ErrorIs(rt, err, budget.ErrExceeded)
					continue
				}
				for _, scope := range wants {
					if last, held := has[scope]; held {
						lost = append(lost, last)
						taken[last.ID] = true // it has ended, on its other scopes too, where its units are free when they are due
					}
					has[scope] = h
				}
			case 1:
				if last, held := has[scopes[pick("whose", 0, 1, 2)]]; held { // to when it is due, or just before or after
					now = last.Due.Add(time.Duration(pick("edge µs", -1, -1, 0, 1)) * time.Microsecond)
				} else {
					now = now.Add(time.Duration(pick("forward s", 1, 5)) * time.Second)
				}
				f.clock.Set(now)
			case 2:
				now = now.Add(-time.Duration(pick("back µs", 1, 1_000_000, 3_000_000, 30_000_000)) * time.Microsecond)
				f.clock.Set(now)
			case 3:
				f.clock.Set(now) // and look: a hold that lost nothing is live until the clock reaches its time
				for _, h := range has {
					got := f.get(h.ID)
					require.Equal(rt, !taken[h.ID] && now.Before(h.Due), got.State == holds.Held, h.ID)
				}
			}
			for _, h := range lost {
				_, err := f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
				require.ErrorIs(rt, err, inState(holds.Expired))
				_, err = f.extend(time.Second, h.ID)
				require.ErrorIs(rt, err, inState(holds.Expired))
			}
		}
	})
	f.neverEarly()
	f.sums()
}

// neverEarly checks that no hold was ended by time before it was due, and that none lost
// a unit while it was held: except for captured units, a line is open as long as its hold.
func (f *fixture) neverEarly() {
	f.Helper()
	require.Zero(f, queryRow[int](f, f.pool, `select count(*) from metered.hold_events e join metered.holds h on h.no = e.hold
		where e.kind = 'x' and e.at < h.due`))
	require.Zero(f, queryRow[int](f, f.pool, `select count(*) from metered.hold_lines l join metered.holds h on h.no = l.hold
		where h.state = 'h' and l.captured = 0 and l.open = 0`))
}

// The same with everybody at once: two seats, one clock that is moved about, and a hold that captured a seat was the
// only one to have it from its placement until then.
func TestExpiry_HandsNoUnitOutTwiceWhileTheClockMoves(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MinTTL: time.Millisecond})
	for _, name := range []string{"read committed", "mixed"} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			retry := &retrier{pool: f.pool}
			workers, rounds := pgtest.Size(4, 5), pgtest.Size(20, 40)
			var mu sync.Mutex
			captured := map[string]bool{}
			move := func() { // 10 ms on average forward, and back half as often
				f.clock.Advance(time.Duration(pgtest.Random(t).IntN(40)-13) * time.Millisecond)
			}
			seats := []string{"seat/1 " + name, "seat/2 " + name}
			require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
				for n := range rounds {
					move()
					r := holds.Placement{ID: fmt.Sprintf("%s %d/%d", name, worker, n), TTL: time.Duration(1+pgtest.Random(t).IntN(60)) * time.Millisecond}
					for _, seat := range seats[pgtest.Random(t).IntN(2) : 1+pgtest.Random(t).IntN(2)] {
						r.Lines = append(r.Lines, capacity(seat, 1, 1))
					}
					if len(r.Lines) == 0 {
						r.Lines = []holds.Line{capacity(seats[0], 1, 1), capacity(seats[1], 1, 1)}
					}
					iso := level(name, worker+n)
					err := retry.run(ctx, iso, func(tx pgx.Tx) error { _, err := f.book.Place(ctx, tx, r); return err })
					if errors.Is(err, budget.ErrExceeded) {
						continue
					}
					if err != nil {
						return err
					}
					move()
					err = retry.run(ctx, iso, func(tx pgx.Tx) error {
						if _, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{r.ID}, All: true}); err != nil {
							return err
						}
						_, err := f.book.Return(ctx, tx, holds.Return{IDs: []string{r.ID}, All: true}) // for the next
						return err
					})
					switch {
					case err == nil:
						mu.Lock()
						captured[r.ID] = true
						mu.Unlock()
					case !errors.Is(err, inState(holds.Expired)):
						return err
					}
				}
				return nil
			}))
			// Each seat was captured by the hold that placed it, in the chain's order.
			n := 0
			for _, seat := range seats {
				has := ""
				for e, err := range f.ledger.Entries(context.Background(), f.pool, seat, budget.EntriesOptions{}) {
					require.NoError(t, err)
					require.LessOrEqual(t, e.Spent-e.Refunded+e.Held, int64(1))
					switch e.Kind {
					case "hold":
						require.Empty(t, has, "placed for another")
						has = e.Hold
					case "capture":
						require.Equal(t, has, e.Hold)
						require.True(t, captured[e.Hold])
						has, n = "", n+1
					case "expire", "release":
						require.False(t, captured[has])
						has = ""
					}
				}
			}
			require.GreaterOrEqual(t, n, len(captured))
			require.NotEmpty(t, captured)
			require.Less(t, len(captured), workers*rounds)
		})
	}
	f.neverEarly()
	f.verify()
}

var isolations = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func execute(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func queryRow[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

// begin opens a transaction that is rolled back at the end of the test.
func begin(t testing.TB, pool *pgxpool.Pool, iso pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: iso})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// retrier runs transactions of one call each, and tries them again after 40001. A
// deadlock is an error, unless it is asked for: no two calls lock in different orders.
type retrier struct {
	pool      *pgxpool.Pool
	deadlocks bool
	retries   atomic.Int64
}

func (r *retrier) run(ctx context.Context, iso pgx.TxIsoLevel, f func(tx pgx.Tx) error) error {
	const attempts = 2000
	var err error
	for range attempts {
		err = pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{IsoLevel: iso}, f)
		if c := code(err); c != sqlstate.SerializationFailure && !(r.deadlocks && c == sqlstate.DeadlockDetected) {
			return err
		}
		r.retries.Add(1)
		if err := pause.Before(ctx, 1); err != nil { // without it the losers collide again
			return err
		}
	}
	return fmt.Errorf("gave up after %d attempts: %w", attempts, err)
}

// dump is all that the tables of holds and the ledger have in them.
func (f *fixture) dump() []string {
	f.Helper()
	var all []string
	for _, table := range []string{"ledger", "refund_sum", "holds", "hold_lines", "hold_events"} {
		rows, err := f.pool.Query(f.Context(), `select row_to_json(x)::text as r from metered.`+table+` x order by r`)
		require.NoError(f, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(f, err)
		all = append(all, table)
		all = append(all, lines...)
	}
	return all
}

// isA reports whether err's chain holds a T.
func isA[T error](err error) bool {
	var target T
	return errors.As(err, &target)
}

// From its deadline on a hold is not extended, and until it is due it can still be captured:
// its units are nobody else's.
func TestExpiry_GraceIsForCaptures(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	scopes := []string{"captured", "released", "expired"}
	for _, scope := range scopes {
		f.mustPlace(holds.Placement{ID: scope, Grace: 10 * time.Second, Lines: []holds.Line{capacity(scope, 1, 1)}})
	}
	f.clock.Set(noon.Add(time.Minute - time.Microsecond))
	_, err := f.extend(time.Second, scopes...)
	require.NoError(t, err)
	for _, at := range []time.Duration{61 * time.Second, 71*time.Second - time.Microsecond} {
		f.clock.Set(noon.Add(at))
		for _, scope := range scopes {
			_, err = f.extend(time.Second, scope)
			require.ErrorIs(t, err, inState(holds.Expired), at)
			require.Equal(t, holds.Held, f.get(scope).State, at)
			_, err = f.charge(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
			require.ErrorIs(t, err, budget.ErrExceeded, at)
		}
	}
	_, err = f.capture(holds.Capture{IDs: []string{"captured"}, All: true})
	require.NoError(t, err)
	_, err = f.release("released")
	require.NoError(t, err)
	f.clock.Advance(time.Microsecond)
	_, err = f.capture(holds.Capture{IDs: []string{"expired"}, All: true})
	require.ErrorIs(t, err, inState(holds.Expired))
	_, err = f.release("expired")
	require.ErrorIs(t, err, inState(holds.Expired))
	_, err = f.charge(budget.Charge{Scope: "expired", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
	require.NoError(t, err)
	f.verify()
}

// tick makes the clock of a database move by a microsecond each time it is read.
func tick(t *testing.T, f *fixture) {
	execute(t, f.pool, `create or replace function metered.clock() returns timestamptz language sql volatile security definer
		as $$ select timestamptz 'epoch' + us / 1000000 * interval '1 second' + us % 1000000 * interval '1 microsecond'
		      from pg_catalog.nextval('pgtest.clock') us $$`)
}

// A hold falls due while a capture of it is under way, between any two readings of
// the clock: the capture is whole or it is none.
func TestCapture_AsTheHoldFallsDueIsWholeOrNone(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	tick(t, f)
	captured, expired := 0, 0
	for us := 0; us < 12; us += pgtest.Size(2, 1) {
		for _, over := range []holds.Over{holds.OverRefused, holds.OverAllowed, holds.OverIfFits} {
			for _, amount := range []int64{5, 8} {
				scope := fmt.Sprintf("%s %d %d", over, us, amount)
				h := f.mustPlace(holds.Placement{ID: scope, Lines: []holds.Line{capacity(scope, 5, 9)}})
				other := f.mustPlace(holds.Placement{ID: scope + "other", TTL: time.Hour, Lines: []holds.Line{capacity(scope, 1, 9)}})
				f.clock.Set(h.Due.Add(-time.Duration(us) * time.Microsecond))
				hs, err := f.capture(holds.Capture{IDs: []string{h.ID}, Over: over, Lines: []holds.Line{capacity(scope, amount, 9)}})
				switch {
				case err == nil:
					require.Equal(t, holds.Captured, hs[0].State)
					captured++
				case over == holds.OverRefused && amount == 8 && !isA[*holds.StateError](err):
					require.ErrorIs(t, err, holds.ErrExcess)
				default:
					if code(err) == "40001" {
						hs, err = f.capture(holds.Capture{IDs: []string{h.ID}, Over: over, Lines: []holds.Line{capacity(scope, amount, 9)}})
						require.Empty(t, hs)
					}
					require.ErrorIs(t, err, inState(holds.Expired))
					expired++
				}
				used, held := f.usage(scope)
				require.LessOrEqual(t, used+held, int64(9))
				_, err = f.release(other.ID)
				require.NoError(t, err)
			}
		}
	}
	require.Positive(t, captured)
	require.Positive(t, expired)
	pgtest.SetClock(t, f.pool, f.clock.Now().Add(time.Hour))
	f.verify()
}

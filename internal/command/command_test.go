package command_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

func TestDo_AnErrorOrPanicOfTheFunctionLeavesNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for step := range wholeSteps + 1 {
		at := func(f func() error) metered.Func[uploaded] {
			return wholeFunc(fmt.Sprint(step), func(n int) error {
				if n == step {
					return f()
				}
				return nil
			})
		}
		cmd := whole(t, pool, c, fmt.Sprint(step))
		_, err := metered.Do(t.Context(), c, cmd, at(func() error { return errOwn }))
		require.ErrorIs(t, err, errOwn)
		require.Equal(t, nothing, footprintOf(t, pool, cmd))

		require.PanicsWithValue(t, "oh", func() {
			_, _ = metered.Do(t.Context(), c, cmd, at(func() error { panic("oh") }))
		})
		require.Equal(t, nothing, footprintOf(t, pool, cmd))
		pgtest.WaitFor(t, "its connections", func() bool { return pool.Stat().AcquiredConns() == 0 })

		ctx, cancel := context.WithCancelCause(t.Context())
		_, err = metered.Do(ctx, c, cmd, at(func() error { cancel(errOwn); return nil }))
		require.Error(t, err)
		require.NotErrorIs(t, err, metered.ErrIndefinite)
		require.Equal(t, nothing, footprintOf(t, pool, cmd))

		_, err = metered.Do(t.Context(), c, cmd, wholeFunc(cmd.ID, nil))
		require.NoError(t, err)
		require.Equal(t, everything, footprintOf(t, pool, cmd))
	}
	require.LessOrEqual(t, pool.Stat().NewConnsCount(), int64(16+wholeSteps+1))
}

// Each flush of a command, before the server has it and after it has dealt with
// it: the backend is killed, the connection is cut, the context cancelled.
func TestDo_AFaultAtAnyFlushIsAllOrNothing(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := newClient(t, pool, metered.Config{})
	kill := func(f *pgtest.Flush) { f.Terminate(t, owner) }
	for what, fault := range map[string]struct {
		do      func(f *pgtest.Flush, cancel func())
		resolve bool // the last flush can be resolved
	}{
		"kill before":   {func(f *pgtest.Flush, _ func()) { kill(f) }, true},
		"kill after":    {func(f *pgtest.Flush, _ func()) { f.Deliver = func() { f.Conn.Answer = f.Ask(); kill(f) } }, true},
		"cut before":    {func(f *pgtest.Flush, _ func()) { f.Lose() }, true},
		"cut after":     {func(f *pgtest.Flush, _ func()) { f.LoseAnswer() }, true},
		"cancel before": {func(_ *pgtest.Flush, cancel func()) { cancel() }, false},
		"cancel after": {func(f *pgtest.Flush, cancel func()) {
			f.Deliver = func() { f.Conn.Answer = f.Ask(); cancel() }
		}, false},
	} {
		for n := 0; ; n++ {
			if n%2 == 0 {
				pool.Reset() // statements are prepared again: flushes of their own
			}
			id := fmt.Sprintf("%s %d", what, n)
			cmd := whole(t, owner, c, id)
			ctx, cancel := context.WithCancel(t.Context())
			var seen atomic.Int64
			var hit atomic.Pointer[pgtest.Flush]
			w.Each(func(f *pgtest.Flush) {
				if seen.Add(1) == int64(n+1) {
					hit.Store(f)
					fault.do(f, cancel)
				}
			})
			_, err := metered.Do(ctx, c, cmd, wholeFunc(id, nil))
			w.Each(nil)
			cancel()
			if hit.Load() == nil {
				require.NoError(t, err)
				require.Greater(t, n, 5)
				break
			}
			pgtest.WaitSettled(t, owner)
			is := footprintOf(t, owner, cmd)
			switch {
			case err == nil:
				require.Equal(t, everything, is, id)
			case errors.Is(err, metered.ErrIndefinite):
				require.True(t, hit.Load().Last() && !fault.resolve, id)
				require.Contains(t, []pgtest.Footprint{nothing, everything}, is, id)
			default:
				require.Equal(t, nothing, is, id)
				require.False(t, hit.Load().Last() && fault.resolve, "%s: %v", id, err)
			}
			pgtest.RequireUsable(t, c, id)
			_, err = metered.Do(t.Context(), c, cmd, wholeFunc(id, nil))
			require.NoError(t, err, id)
			require.Equal(t, everything, footprintOf(t, owner, cmd), id)
		}
	}
}

// Each table that a command writes to, as each row is written and when it is
// committed: an error, and the end of the backend. The short form has each of them as rows are written and at the commit.
func TestDo_AFailureInsideTheServerLeavesNothing(t *testing.T) {
	t.Parallel()
	pool, _ := setUp(t, metered.Config{})
	c := newClient(t, pool, metered.Config{ResolveTimeout: 50 * time.Millisecond})
	const raise, terminate = "raise 'no'", "perform pg_terminate_backend(pg_backend_pid())"
	all := []string{raise, terminate}
	for when, whats := range map[string][]string{
		"before": pgtest.Size([]string{raise}, all), "after": pgtest.Size([]string{terminate}, all), "deferred": all,
	} {
		for _, what := range whats {
			t.Run(when+" "+what, func(t *testing.T) {
				_, err := pool.Exec(t.Context(), `create or replace function fault() returns trigger language plpgsql as
					$$ begin `+what+`; return new; end $$`)
				require.NoError(t, err)
				for _, table := range []string{"uploads", "metered.tokens", "river_job", "metered.job_keys", "metered.ledger", "metered.operations"} {
					cmd := whole(t, pool, c, when+what+table)
					trigger := `create trigger fault ` + when + ` insert or update on ` + table + ` for each row execute function fault()`
					if when == "deferred" {
						trigger = `create constraint trigger fault after insert or update on ` + table +
							` deferrable initially deferred for each row execute function fault()`
					}
					_, err := pool.Exec(t.Context(), trigger)
					require.NoError(t, err)
					_, err = metered.Do(t.Context(), c, cmd, wholeFunc(cmd.ID, nil))
					require.Error(t, err)
					if what == raise {
						require.ErrorContains(t, err, "P0001", table)
						require.NotErrorIs(t, err, metered.ErrIndefinite, table)
					}
					pgtest.WaitSettled(t, pool)
					require.Equal(t, nothing, footprintOf(t, pool, cmd), table)
					_, err = pool.Exec(t.Context(), `drop trigger fault on `+table)
					require.NoError(t, err)
					pgtest.RequireUsable(t, c, cmd.ID)
					_, err = metered.Do(t.Context(), c, cmd, wholeFunc(cmd.ID, nil))
					require.NoError(t, err)
					require.Equal(t, everything, footprintOf(t, pool, cmd), table)
				}
			})
		}
	}
}

// A repetition that is just about to look for its record while a purge deletes that, and
// moves the horizon, finds neither the record nor room before the horizon.
func TestDo_APurgeThatCommitsBetweenItsLooksDoesNotLetAnIDRunTwice(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	ctx := t.Context()
	clock := pgtest.SetClock(t, pool, monday)
	cmd := metered.Command{ID: "op", IssuedAt: monday}
	_, err := metered.Do(ctx, c, cmd, upload("first"))
	require.NoError(t, err)
	clock.Advance(time.Hour)

	purging, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer purging.Rollback(context.Background())
	// Only the look at the records waits for this, not that at the horizon.
	_, err = purging.Exec(ctx, "lock table metered.operations in access exclusive mode")
	require.NoError(t, err)
	answer := pgtest.Going(func() error {
		_, err := metered.Do(ctx, c, cmd, upload("second"))
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	require.EqualValues(t, 1, pgtest.Value[int](t, purging, "select deleted from metered.purge_operations(null, $1, 10, 1000)", clock.Now()))
	require.NoError(t, purging.Commit(ctx))
	require.ErrorIs(t, <-answer, budget.ErrRetired)
	require.Equal(t, "first", pgtest.Value[string](t, pool, "select string_agg(name, ',') from uploads"))
}

// A record that is still there is the answer, whatever the horizon says of its time.
func TestDo_ARecordBeforeTheHorizonIsReplayed(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, monday)
	do := func(id string) (metered.Outcome[uploaded], error) {
		return metered.Do(t.Context(), c, metered.Command{ID: id, IssuedAt: monday}, upload(id))
	}
	_, err := do("early")
	require.NoError(t, err)
	clock.Advance(time.Hour)
	_, err = do("late")
	require.NoError(t, err)
	clock.Advance(time.Minute)
	purged, err := purge.Operations.Delete(t.Context(), pool, purge.Options{OlderThan: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 1, purged)
	_, err = do("early")
	require.ErrorIs(t, err, budget.ErrRetired)
	out, err := do("late")
	require.NoError(t, err)
	require.True(t, out.Replayed)
}

// The key of its record makes an id exact, and not the lock that calls queue on: a record that somebody made without
// that lock rolls the whole command back.
func TestDo_ARecordThatAppearsMeanwhileTakesTheCommandBack(t *testing.T) {
	t.Parallel()
	for what, do := range map[string]func(tx pgx.Tx, c *metered.Client, cmd metered.Command, fn metered.Func[uploaded]) (metered.Outcome[uploaded], error){
		"Do": func(_ pgx.Tx, c *metered.Client, cmd metered.Command, fn metered.Func[uploaded]) (metered.Outcome[uploaded], error) {
			return metered.Do(t.Context(), c, cmd, fn)
		},
		"DoTx": func(tx pgx.Tx, c *metered.Client, cmd metered.Command, fn metered.Func[uploaded]) (metered.Outcome[uploaded], error) {
			_, err := metered.DoTx(t.Context(), c, tx, cmd, fn)
			require.ErrorContains(t, err, "40001")
			require.True(t, metered.Retryable(err))
			return metered.DoTx(t.Context(), c, tx, cmd, fn) // the savepoint is gone: the same transaction can ask again
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			ctx := t.Context()
			_, err := metered.Do(ctx, c, metered.Command{ID: "model"}, upload("another's"))
			require.NoError(t, err)
			tx, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			runs := 0
			out, err := do(tx, c, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
				runs++
				_, err := pool.Exec(ctx, `insert into metered.operations (tenant, id, at, fingerprint, result)
					select tenant, 'op', at, fingerprint, result from metered.operations where id = 'model'`)
				require.NoError(t, err)
				return upload("own")(ctx, tx)
			})
			require.NoError(t, err)
			require.Equal(t, 1, runs)
			require.True(t, out.Replayed)
			require.Equal(t, "another's", out.Result.Name)
			require.NoError(t, tx.Commit(ctx))
			require.Equal(t, 1, count(t, pool, "uploads"))
		})
	}
}

// oneWay goes to JSON and does not come back.
type oneWay struct{}

func (oneWay) MarshalJSON() ([]byte, error) { return []byte(`"x"`), nil }
func (*oneWay) UnmarshalJSON([]byte) error  { return errors.New("one way") }

func TestDo_AResultThatCannotBeReplayedCommitsNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for what, do := range map[string]func(cmd metered.Command) error{
		"a channel":         resulting(c, make(chan int)),
		"a function":        resulting(c, func() {}),
		"not a number":      resulting(c, math.NaN()),
		"one way":           resulting(c, oneWay{}),
		"an interface":      resulting[fmt.Stringer](c, time.Second),
		"an error":          resulting(c, errOwn), // {}, which does not come back as an error
		"not UTF-8":         resulting(c, uploaded{Name: "\xff"}),
		"not UTF-8, as key": resulting(c, map[string]int{"\xff": 1}),
		"not UTF-8, raw":    resulting(c, json.RawMessage("\"\xff\"")),
		"one byte too long": resulting(c, strings.Repeat("x", 1<<20-1)),
	} {
		cmd := whole(t, pool, c, what)
		err := do(cmd)
		require.ErrorIs(t, err, fault.New("invalid_result", ""), what)
		require.Equal(t, "invalid_result", metered.Code(err))
		require.Equal(t, nothing, footprintOf(t, pool, cmd), what)
	}
	cmd := whole(t, pool, c, "as long as it may be")
	require.NoError(t, resulting(c, strings.Repeat("x", 1<<20-2))(cmd))
	require.Equal(t, everything, footprintOf(t, pool, cmd))
}

func resulting[R any](c *metered.Client, result R) func(metered.Command) error {
	return func(cmd metered.Command) error {
		_, err := metered.Do(context.Background(), c, cmd, func(ctx context.Context, tx *metered.Tx) (R, error) {
			_, err := wholeFunc(cmd.ID, nil)(ctx, tx)
			return result, err
		})
		return err
	}
}

func TestDo_TheFirstResultEqualsThatOfAReplay(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	type result struct {
		At      time.Time
		Any     any
		Text    string
		hidden  int
		Private int `json:"-"`
	}
	cmd := metered.Command{ID: "op", Input: "\ufffd"}
	fn := func(context.Context, *metered.Tx) (result, error) {
		return result{At: time.Now(), Any: 7, Text: "a\ufffd", hidden: 1, Private: 2}, nil
	}
	first, err := metered.Do(t.Context(), c, cmd, fn)
	require.NoError(t, err)
	require.Equal(t, float64(7), first.Result.Any)
	require.Equal(t, "a\ufffd", first.Result.Text)
	require.Zero(t, first.Result.hidden+first.Result.Private)
	again, err := metered.Do(t.Context(), c, cmd, fn)
	require.NoError(t, err)
	require.Equal(t, first.Result, again.Result)

	_, err = metered.Do(t.Context(), c, cmd, func(context.Context, *metered.Tx) (int, error) { return 0, nil })
	require.ErrorIs(t, err, fault.New("invalid_result", ""), "the record does not fit another type")
}

func TestDo_ChargesOfTheFunctionAddToThoseDeclared(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{charge("s", 2, 10)}}
	out, err := metered.Do(t.Context(), c, cmd, func(_ context.Context, tx *metered.Tx) (any, error) {
		require.NoError(t, tx.Charge(charge("s", 3, 10), charge("t", 1, 0)))
		require.ErrorIs(t, tx.Charge(charge("", 1, 0)), budget.ErrArgument) // and leaves the others
		return nil, tx.Charge(charge("s", 5, 10))
	})
	require.NoError(t, err)
	require.Equal(t, int64(10), out.Receipt.Entries[0].Amount)
	require.Equal(t, int64(10), used(t, pool, c, "s"))
	require.Equal(t, int64(1), used(t, pool, c, "t"))
	require.Equal(t, "op", pgtest.Value[string](t, pool, "select operation from metered.ledger where scope = 't'"))
	require.Equal(t, []byte("null"), []byte(out.Raw))
}

func TestLookup_ReturnsTheRecord(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := c.Lookup(ctx, pool, "ns", "op")
	require.ErrorIs(t, err, metered.ErrUnknownOperation)
	issued := time.Now().Truncate(time.Microsecond)
	cmd := metered.Command{Tenant: "ns", ID: "op", IssuedAt: issued, Charges: []budget.Charge{charge("s", 3, 10)}}
	out, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := c.Lookup(ctx, pool, "ns", "op") // does not wait
		require.ErrorIs(t, err, metered.ErrUnknownOperation)
		return upload("a")(ctx, tx)
	})
	require.NoError(t, err)
	op, err := c.Lookup(ctx, pool, "ns", "op")
	require.NoError(t, err)
	require.Equal(t, json.RawMessage(`{"name":"a"}`), op.Result)
	require.True(t, op.At.Equal(out.At))
	require.True(t, op.IssuedAt.Equal(issued))
	require.Equal(t, out.Receipt.Entries[0].Seq, op.Receipt.Entries[0].Seq)
	require.Equal(t, "ns", op.Tenant)
	_, err = c.Lookup(ctx, pool, "", "op")
	require.ErrorIs(t, err, metered.ErrUnknownOperation)

	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "mine"}, upload("b"))
		require.NoError(t, err)
		op, err := c.Lookup(ctx, tx, "", "mine")
		require.True(t, op.IssuedAt.IsZero())
		require.Empty(t, op.Receipt.Entries)
		return err
	}))
}

package metered_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// requireUsable runs a command on the pool.
func requireUsable(t *testing.T, c *metered.Client, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.Eventually(t, func() bool { // a killed connection may still be in the pool
		_, err := metered.Do[any](ctx, c, metered.Command{ID: "usable/" + id}, nil)
		return err == nil
	}, 10*time.Second, time.Millisecond)
}

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
		require.Zero(t, pool.Stat().AcquiredConns())

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
func TestDo_WhateverHappensAtAnyFlushItIsAllOrNothing(t *testing.T) {
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
				require.Contains(t, []footprint{nothing, everything}, is, id)
			default:
				require.Equal(t, nothing, is, id)
				require.False(t, hit.Load().Last() && fault.resolve, "%s: %v", id, err)
			}
			requireUsable(t, c, id)
			_, err = metered.Do(t.Context(), c, cmd, wholeFunc(id, nil))
			require.NoError(t, err, id)
			require.Equal(t, everything, footprintOf(t, owner, cmd), id)
		}
	}
}

// Each table that a command writes to, as each row is written and when it is
// committed: an error, and the end of the backend.
func TestDo_AFailureInsideTheServerLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before", "after", "deferred"} {
		for _, what := range []string{"raise 'no'", "perform pg_terminate_backend(pg_backend_pid())"} {
			t.Run(when+" "+what, func(t *testing.T) {
				t.Parallel()
				pool, _ := setUp(t, metered.Config{})
				c := newClient(t, pool, metered.Config{ResolveTimeout: 200 * time.Millisecond})
				_, err := pool.Exec(t.Context(), `create function fault() returns trigger language plpgsql as
					$$ begin `+what+`; return new; end $$`)
				require.NoError(t, err)
				for _, table := range []string{"uploads", "metered.tokens", "river_job", "metered.job_keys", "metered.ledger", "metered.operations"} {
					cmd := whole(t, pool, c, table)
					trigger := `create trigger fault ` + when + ` insert or update on ` + table + ` for each row execute function fault()`
					if when == "deferred" {
						trigger = `create constraint trigger fault after insert or update on ` + table +
							` deferrable initially deferred for each row execute function fault()`
					}
					_, err := pool.Exec(t.Context(), trigger)
					require.NoError(t, err)
					_, err = metered.Do(t.Context(), c, cmd, wholeFunc(table, nil))
					require.Error(t, err)
					if what == "raise 'no'" {
						require.ErrorContains(t, err, "P0001", table)
						require.NotErrorIs(t, err, metered.ErrIndefinite, table)
					}
					pgtest.WaitSettled(t, pool)
					require.Equal(t, nothing, footprintOf(t, pool, cmd), table)
					_, err = pool.Exec(t.Context(), `drop trigger fault on `+table)
					require.NoError(t, err)
					requireUsable(t, c, table)
					_, err = metered.Do(t.Context(), c, cmd, wholeFunc(table, nil))
					require.NoError(t, err)
					require.Equal(t, everything, footprintOf(t, pool, cmd), table)
				}
			})
		}
	}
}

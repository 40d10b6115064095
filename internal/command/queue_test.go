package command_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The whole last flush is with the server, COMMIT included, and waits for a scope
// that another session has locked.

func TestDo_AClientLostWhileQueuedForAScopeLeavesNothing(t *testing.T) {
	t.Parallel()
	owner, w, c, cmd := onWire(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}, ResolveTimeout: time.Second}, nil)
	release := lockScope(t, owner, c, "op/b")
	w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) {
		w.Refuse(true) // the client is gone: it will not come back
		f.Deliver = func() {
			_ = f.Pass()
			pgtest.WaitAdvisory(t, owner, 1)
			f.Close()
		}
	})
	_, err := metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
	require.ErrorIs(t, err, metered.ErrIndefinite)
	pgtest.WaitFor(t, "nobody to wait for a lock", func() bool {
		return pgtest.Value[int](t, owner, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event = 'advisory'`) == 0
	})
	release()
	pgtest.WaitSettled(t, owner)
	require.Equal(t, nothing, footprintOf(t, owner, cmd))

	w.Refuse(false)
	_, err = metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
	require.NoError(t, err)
	require.Equal(t, everything, footprintOf(t, owner, cmd))
}

func TestDo_TheServerGivesUpBeforeTheDeadline(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Hour}})
	cmd := whole(t, pool, c, "op")
	release := lockScope(t, pool, c, "op/b")
	pgtest.RequireUsable(t, c, "warm")
	connections := pool.Stat().NewConnsCount()
	_, err := metered.Do(pgtest.NewDeadline(t, 10*time.Second), c, cmd, wholeFunc("op", nil))
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))
	require.Equal(t, connections, pool.Stat().NewConnsCount(), "a connection was given up")
	release()
	_, err = metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
	require.NoError(t, err)
	require.Equal(t, everything, footprintOf(t, pool, cmd))
}

// A command's calls for holds wait as long as the deadline leaves when they are sent, and not as long as it left when
// the command began.
func TestDo_AHoldGivesUpBeforeTheDeadline(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Hour}})
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "before", Input: 1},
		pgtest.Placing(holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 9)}}))
	require.NoError(t, err)
	lockScope(t, pool, c, "seat")
	for what, fn := range map[string]func(ctx context.Context, tx *metered.Tx) error{
		"place": func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Place(ctx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 9)}}, nil)
			return err
		},
		"capture": func(_ context.Context, tx *metered.Tx) error {
			return tx.Capture(holds.Capture{IDs: []string{"h"}, All: true})
		},
		"extend": func(_ context.Context, tx *metered.Tx) error {
			return tx.Extend(holds.Extend{IDs: []string{"h"}, By: time.Second})
		},
		"release and charge": func(_ context.Context, tx *metered.Tx) error {
			return errors.Join(tx.Release(holds.Release{IDs: []string{"h"}}), tx.Charge(charge("other", 1, 0)))
		},
	} {
		t.Run(what, func(t *testing.T) {
			deadline := pgtest.NewDeadline(t, time.Hour)
			_, err := metered.Do(deadline, c, metered.Command{ID: what, Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
				deadline.Set(100 * time.Millisecond)
				return nil, fn(ctx, tx)
			})
			require.ErrorIs(t, err, budget.ErrBusy)
			require.NotErrorIs(t, err, metered.ErrIndefinite)
		})
	}
}

func TestDo_AScopeIsWaitedForNoLongerThanTheLockTimeout(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}})
	cmd := whole(t, pool, c, "op")
	release := lockScope(t, pool, c, "op/b")
	_, err := metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
	require.ErrorIs(t, err, budget.ErrBusy)
	require.Equal(t, "busy", metered.Code(err))
	require.Equal(t, nothing, footprintOf(t, pool, cmd))
	release()
	_, err = metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
	require.NoError(t, err)
}

// A cancelled context closes the connection under the waiting flush.
func TestDo_CancelledWhileQueuedForAScopeLeavesNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	cmd := whole(t, pool, c, "op")
	release := lockScope(t, pool, c, "op/b")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := metered.Do(ctx, c, cmd, wholeFunc("op", nil))
		done <- err
	}()
	pgtest.WaitAdvisory(t, pool, 1)
	cancel()
	require.ErrorIs(t, <-done, metered.ErrIndefinite)
	pgtest.WaitFor(t, "nobody to wait for a lock", func() bool {
		return pgtest.Value[int](t, pool, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event = 'advisory'`) == 0
	})
	release()
	pgtest.WaitSettled(t, pool)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))
}

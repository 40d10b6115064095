package command_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestDo_RetriesASerializationFailureWhole(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := whole(t, pool, c, "op")
	cmd.Isolation = pgx.RepeatableRead
	_, err := pool.Exec(t.Context(), "insert into uploads values ('row')")
	require.NoError(t, err)
	var runs int
	_, err = metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		runs++
		require.NotNil(t, tx.Grant, "the token is spent by each attempt")
		out, err := wholeFunc("op", nil)(ctx, tx)
		require.NoError(t, err)
		if runs < 3 { // somebody else writes the row that this snapshot has seen
			_, err := pool.Exec(ctx, "update uploads set name = name where name = 'row'")
			require.NoError(t, err)
		}
		_, err = tx.Exec(ctx, "update uploads set name = name where name = 'row'")
		return out, err
	})
	require.NoError(t, err)
	require.Equal(t, 3, runs)
	require.Equal(t, everything, footprintOf(t, pool, cmd))
}

func TestDo_RetriesADeadlockWhole(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	_, err := pool.Exec(t.Context(), "create table counters (id int primary key, n int); insert into counters values (0, 0), (1, 0)")
	require.NoError(t, err)
	var runs, here atomic.Int64
	both := make(chan struct{})
	atOnce(2, func(i int) {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: []string{"a", "b"}[i]}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			runs.Add(1)
			if _, err := tx.Exec(ctx, "update counters set n = n + 1 where id = $1", i); err != nil {
				return nil, err
			}
			if here.Add(1) == 2 {
				close(both)
			}
			<-both
			_, err := tx.Exec(ctx, "update counters set n = n + 1 where id = $1", 1-i)
			return nil, err
		})
		if err != nil {
			t.Error(err)
		}
	})
	// More than 3 if the one that was ended locks its row again before the other gets it.
	require.GreaterOrEqual(t, runs.Load(), int64(3))
	require.Equal(t, 4, pgtest.Value[int](t, pool, "select sum(n) from counters"))
}

func TestDo_GivesUpAfterMaxAttempts(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{MaxAttempts: 3})
	cmd := whole(t, pool, c, "op")
	for _, state := range []string{"40001", "40P01"} {
		runs := 0
		_, err := metered.Do(t.Context(), c, cmd, wholeFunc("op", func(step int) error {
			if step == wholeSteps {
				runs++
				return &pgconn.PgError{Code: state}
			}
			return nil
		}))
		require.ErrorContains(t, err, "gave up after 3 attempts")
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, state, pgErr.Code)
		require.Equal(t, 3, runs)
		require.Equal(t, nothing, footprintOf(t, pool, cmd))
	}
	for _, state := range []string{"23505", "40003", "55P03"} { // others are not for Do to retry
		runs := 0
		_, err := metered.Do(t.Context(), c, cmd, func(context.Context, *metered.Tx) (uploaded, error) {
			runs++
			return uploaded{}, &pgconn.PgError{Code: state}
		})
		require.ErrorContains(t, err, state)
		require.Equal(t, 1, runs)
	}
}

func TestDo_StopsRetryingWhenCancelled(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{MaxAttempts: 100})
	cmd := whole(t, pool, c, "op")
	ctx, cancel := context.WithCancelCause(t.Context())
	runs := 0
	_, err := metered.Do(ctx, c, cmd, func(context.Context, *metered.Tx) (uploaded, error) {
		if runs++; runs == 2 {
			cancel(errOwn)
		}
		return uploaded{}, &pgconn.PgError{Code: "40001"}
	})
	require.ErrorIs(t, err, errOwn)
	require.ErrorContains(t, err, "40001")
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Equal(t, 2, runs)
	pgtest.WaitFor(t, "its connections", func() bool { return pool.Stat().AcquiredConns() == 0 })
}

func TestDoTx_DoesNotRetry(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	runs := 0
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(t.Context(), c, tx, metered.Command{ID: "op"}, func(context.Context, *metered.Tx) (any, error) {
			runs++
			return nil, &pgconn.PgError{Code: "40001"}
		})
		require.ErrorContains(t, err, "40001")
		return nil
	}))
	require.Equal(t, 1, runs)
}

// timeouts reads those of the transaction, in ms.
func timeouts(t *testing.T, tx pgx.Tx) [3]int {
	var ms [3]int
	require.NoError(t, tx.QueryRow(context.Background(), `select
		extract(epoch from current_setting('statement_timeout')::interval) * 1000,
		extract(epoch from current_setting('lock_timeout')::interval) * 1000,
		extract(epoch from current_setting('idle_in_transaction_session_timeout')::interval) * 1000`).Scan(&ms[0], &ms[1], &ms[2]))
	return ms
}

func TestDo_BoundsTheTransactionByTheDeadline(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	within := func(ctx context.Context, id string) (ms [3]int) {
		_, err := metered.Do(ctx, c, metered.Command{ID: id}, func(_ context.Context, tx *metered.Tx) (any, error) {
			ms = timeouts(t, tx)
			return nil, nil
		})
		require.NoError(t, err)
		return ms
	}
	require.Equal(t, [3]int{}, within(t.Context(), "no deadline"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	for _, ms := range within(ctx, "deadline") {
		require.Greater(t, ms, 3_000_000)
		require.LessOrEqual(t, ms, 3_600_000-250, "a margin is left")
	}
	// A session that is stricter stays so.
	_, err := pool.Exec(t.Context(), `do $$ begin execute format('alter database %I set statement_timeout = ''600s''', current_database()); end $$`)
	require.NoError(t, err)
	pool.Reset()
	strict := within(ctx, "strict")
	require.Equal(t, 600_000, strict[0])
	require.Greater(t, strict[1], 600_000)
	require.Equal(t, [3]int{600_000, 0, 0}, within(t.Context(), "strict, no deadline"))
}

func TestDo_AStatementThatOutlastsTheDeadlineIsEndedByTheServer(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	pgtest.RequireUsable(t, c, "warm")
	connections := pool.Stat().NewConnsCount()
	_, err := metered.Do(pgtest.NewDeadline(t, 10*time.Second), c, metered.Command{ID: "op", Charges: []budget.Charge{charge("s", 1, 0)}},
		func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Exec(ctx, "select pg_sleep(60)")
			return nil, err
		})
	require.ErrorContains(t, err, "57014")
	require.Equal(t, connections, pool.Stat().NewConnsCount())
	require.Zero(t, used(t, pool, c, "s"))
}

func TestDo_AnEndedContextSaysHowAndWhy(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	waits := func(ctx context.Context, _ *metered.Tx) (any, error) { <-ctx.Done(); return nil, nil }
	ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Second, errOwn)
	defer cancel()
	_, err := metered.Do(ctx, c, metered.Command{ID: "op"}, waits)
	require.ErrorIs(t, err, metered.ErrTimeout)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, errOwn)

	for what, fn := range map[string]metered.Func[any]{
		"before the commit": func(context.Context, *metered.Tx) (any, error) { return nil, nil },
		"while retrying":    func(context.Context, *metered.Tx) (any, error) { return nil, &pgconn.PgError{Code: "40001"} },
	} {
		ctx, stop := context.WithCancelCause(t.Context())
		_, err = metered.Do(ctx, c, metered.Command{ID: what}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			stop(errOwn)
			return fn(ctx, tx)
		})
		require.ErrorIs(t, err, context.Canceled, what)
		require.ErrorIs(t, err, errOwn, what)
		require.NotErrorIs(t, err, metered.ErrTimeout, what)
	}
}

func TestDo_ADeadlineOfTheFunctionsOwnIsItsOwnError(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	slow := fmt.Errorf("asking for the price: %w", context.DeadlineExceeded)
	for _, deadline := range []time.Duration{0, time.Minute} {
		ctx, cancel := t.Context(), context.CancelFunc(func() {})
		if deadline > 0 {
			ctx, cancel = context.WithTimeout(ctx, deadline)
		}
		_, err := metered.Do(ctx, c, metered.Command{ID: "op"}, func(context.Context, *metered.Tx) (any, error) { return nil, slow })
		cancel()
		require.ErrorIs(t, err, slow)
		require.NotErrorIs(t, err, metered.ErrTimeout)
		require.Empty(t, metered.Code(err))
	}
}

// A command captures a hold and charges. While it waits for its scope the hold is placed, on
// another scope, whose lock comes first in the one order. Would the capture see the hold, it
// would lock that scope late, and could deadlock with a charge of both.
func TestDo_AHoldThatIsPlacedWhileItWaitsIsNotLockedLate(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, c := setUp(t, metered.Config{})
	own, placed := "a", "b"
	if c.Budget.LockKey(own) < c.Budget.LockKey(placed) {
		own, placed = placed, own
	}
	release := lockScope(t, pool, c, own)
	command := pgtest.Going(func() error {
		_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
			if err := tx.Capture(holds.Capture{IDs: []string{"h"}, All: true}); err != nil {
				return nil, err
			}
			return nil, tx.Charge(budget.Charge{Scope: own, Amount: 1})
		})
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	_, err := pgtest.InTx(ctx, pool, func(tx pgx.Tx) (holds.Hold, error) {
		return c.Holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{{Scope: placed, Amount: 1}}})
	})
	require.NoError(t, err)
	charge := pgtest.Going(func() error {
		_, err := pgtest.InTx(ctx, pool, func(tx pgx.Tx) (budget.Receipt, error) {
			return c.Budget.Charge(ctx, tx, budget.Charge{Scope: own, Amount: 1}, budget.Charge{Scope: placed, Amount: 1})
		})
		return err
	})
	pgtest.WaitQueued(t, pool, 2)
	release()
	require.NoError(t, <-charge)
	require.NoError(t, <-command)
	require.Zero(t, pgtest.Value[int](t, pool, `select deadlocks from pg_stat_database where datname = current_database()`))
	require.Equal(t, int64(2), used(t, pool, c, own))
	require.Equal(t, int64(2), used(t, pool, c, placed))
}

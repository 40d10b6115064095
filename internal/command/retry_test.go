package command_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/tokens"
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
	require.Zero(t, pool.Stat().AcquiredConns())
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
	_, err := pool.Exec(t.Context(), `do $$ begin execute format('alter database %I set statement_timeout = ''3s''', current_database()); end $$`)
	require.NoError(t, err)
	pool.Reset()
	strict := within(ctx, "strict")
	require.Equal(t, 3_000, strict[0])
	require.Greater(t, strict[1], 3_000)
	require.Equal(t, [3]int{3_000, 0, 0}, within(t.Context(), "strict, no deadline"))
}

func TestDo_AStatementThatOutlastsTheDeadlineIsEndedByTheServer(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	pgtest.RequireUsable(t, c, "warm")
	connections := pool.Stat().NewConnsCount()
	_, err := metered.Do(pgtest.NewDeadline(t, 3*time.Second), c, metered.Command{ID: "op", Charges: []budget.Charge{charge("s", 1, 0)}},
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
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errOwn)
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

// Errors as they come, of a server that is used in all these ways.
func TestRetryable_IsTrueOfErrorsThatMayPass(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{LockTimeout: 50 * time.Millisecond, MaxAttempts: 1})
	_, err := pool.Exec(t.Context(), "insert into uploads values ('row')")
	require.NoError(t, err)
	lockScope(t, pool, c, "locked")
	fill(t, pool, c, "full", 5)
	runs := 0
	do := func(ctx context.Context, cmd metered.Command, fn metered.Func[any]) error {
		runs++
		cmd.ID = fmt.Sprint("op ", runs)
		_, err := metered.Do(ctx, c, cmd, fn)
		return err
	}
	in := func(fn metered.Func[any]) func() error {
		return func() error { return do(t.Context(), metered.Command{}, fn) }
	}
	exec := func(sql string) func() error {
		return in(func(ctx context.Context, tx *metered.Tx) (any, error) { _, err := tx.Exec(ctx, sql); return nil, err })
	}
	elsewhere := func(change func(*pgxpool.Config)) func() error {
		return func() error {
			_, err := metered.Do[any](t.Context(), newClient(t, pgtest.Reopen(t, pool, change), metered.Config{}), metered.Command{ID: "op"}, nil)
			return err
		}
	}
	charges := func(scope string) metered.Command {
		return metered.Command{Charges: []budget.Charge{charge(scope, 1, 5)}}
	}

	for what, test := range map[string]struct {
		want bool
		do   func() error
	}{
		"busy": {true, func() error { return do(t.Context(), charges("locked"), nil) }},
		"busy, of a piece": {true, func() error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := c.Budget.Charge(t.Context(), tx, charge("locked", 1, 0))
				return err
			})
		}},
		"the context's deadline": {true, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			return do(ctx, metered.Command{}, func(ctx context.Context, tx *metered.Tx) (any, error) {
				_, err := tx.Exec(ctx, "select pg_sleep(60)")
				return nil, err
			})
		}},
		"the context's deadline, of a piece": {true, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := c.Budget.Charge(ctx, tx, charge("locked", 1, 0))
				return err
			})
		}},
		"the session's timeout": {true, exec("set local statement_timeout = 10; select pg_sleep(60)")},
		"a serialization failure": {true, func() error {
			return do(t.Context(), metered.Command{Isolation: pgx.RepeatableRead}, func(ctx context.Context, tx *metered.Tx) (any, error) {
				_ = pgtest.Value[string](t, tx, "select name from uploads")
				_, err := pool.Exec(ctx, "update uploads set name = name")
				require.NoError(t, err)
				_, err = tx.Exec(ctx, "update uploads set name = name")
				return nil, err
			})
		}},
		"a server shutting down":       {true, exec("select pg_terminate_backend(pg_backend_pid()), pg_sleep(60)")},
		"a lost connection, unnoticed": {true, in(func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, tx.Conn().Close(ctx) })},
		"a refused connection": {true, elsewhere(func(config *pgxpool.Config) {
			config.ConnConfig.Host, config.ConnConfig.Port, config.ConnConfig.Fallbacks = "127.0.0.1", 1, nil
		})},
		"a host that is not found": {true, elsewhere(func(config *pgxpool.Config) {
			config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) { return nil, errOwn }
		})},

		"no error":         {false, in(nil2)},
		"a wrong database": {false, elsewhere(func(config *pgxpool.Config) { config.ConnConfig.Database = "nowhere" })},
		"no credit":        {false, func() error { return do(t.Context(), charges("full"), nil) }},
		"attempts":         {false, func() error { return do(t.Context(), metered.Command{Sticky: charges("full").Charges}, nil) }},
		"a wrong token":    {false, func() error { return do(t.Context(), metered.Command{Token: redeem(unknownToken(t, c))}, nil) }},
		"an argument":      {false, func() error { return do(t.Context(), metered.Command{Name: "\xff"}, nil) }},
		"its own control":  {false, exec("commit")},
		"its own error":    {false, in(func(context.Context, *metered.Tx) (any, error) { return nil, errOwn })},
		"its own deadline": {true, in(func(context.Context, *metered.Tx) (any, error) {
			return nil, fmt.Errorf("asking for the price: %w", context.DeadlineExceeded)
		})},
		"its own constraint": {false, exec("insert into uploads values ('row')")},
		"its own syntax":     {false, exec("no")},
		"swallowed": {false, in(func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, _ = tx.Exec(ctx, "no")
			return nil, nil
		})},
		"not there":       {false, func() error { _, err := c.Lookup(t.Context(), pool, "", "op"); return err }},
		"an unknown hold": {false, func() error { _, err := c.Holds.Get(t.Context(), pool, "", "hold", ""); return err }},
		"cancelled": {false, func() error {
			ctx, cancel := context.WithCancel(t.Context())
			return do(ctx, metered.Command{}, func(ctx context.Context, tx *metered.Tx) (any, error) {
				cancel()
				_, err := tx.Exec(ctx, "select")
				return nil, err
			})
		}},
		"not migrated": {false, func() error {
			other, err := metered.New(pool, metered.Config{Schema: "other"})
			require.NoError(t, err)
			_, err = metered.Do[any](t.Context(), other, metered.Command{ID: "op"}, nil)
			return err
		}},
	} {
		err := test.do()
		require.Equal(t, test.want, metered.Retryable(err), "%s: %v", what, err)
		require.Equal(t, what == "no error", err == nil, "%s: %v", what, err)
	}
}

// A flush that is lost, before the last one and as the last one.
func TestRetryable_ALostConnection(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct {
		pick func(*pgtest.Flush) bool
		err  error
	}{
		"first":  {func(f *pgtest.Flush) bool { return f.Has("begin_command") }, io.ErrClosedPipe}, // on another connection, which is refused
		"last":   {(*pgtest.Flush).Last, metered.ErrIndefinite},
		"sticky": {func(f *pgtest.Flush) bool { return f.Has(".charge($1") }, metered.ErrSticky},
	} {
		_, w, c, cmd := onWire(t, metered.Config{ResolveTimeout: 100 * time.Millisecond}, func(config *pgxpool.Config) { config.MaxConns = 2 })
		if what == "sticky" {
			cmd.Sticky = tries
		}
		w.Once(test.pick, func(f *pgtest.Flush) {
			f.Lose()
			w.Refuse(what != "sticky")
		})
		_, err := metered.Do[any](t.Context(), c, cmd, nil)
		require.ErrorIs(t, err, test.err, what)
		require.True(t, metered.Retryable(err), "%s: %v", what, err)
	}
}

// A refusal is final, whatever else went wrong beside it.
func TestRetryable_NoRefusalIs(t *testing.T) {
	t.Parallel()
	for _, refusal := range []error{
		budget.ErrExceeded, budget.ErrRefundExceeds, tokens.ErrInvalid,
		holds.ErrTaken, holds.ErrState, holds.ErrUnknown, holds.ErrExcess, holds.ErrCeiling, holds.ErrNotReturnable,
	} {
		require.False(t, metered.Retryable(errors.Join(refusal, context.DeadlineExceeded)), refusal)
	}
	require.True(t, metered.Retryable(errors.Join(metered.ErrConflict, context.DeadlineExceeded)))
}

// Those that are not to be had on demand.
func TestRetryable_OfOtherErrors(t *testing.T) {
	t.Parallel()
	answer := func(severity, state string) error {
		return fmt.Errorf("wrapped: %w", &pgconn.PgError{SeverityUnlocalized: severity, Code: state})
	}
	for _, err := range []error{
		answer("FATAL", "57P02"), answer("FATAL", "57P03"), answer("FATAL", "53300"), answer("ERROR", "53200"), answer("FATAL", "08006"),
		answer("FATAL", "08P01"), answer("ERROR", "55P03"), answer("ERROR", "40P01"), answer("FATAL", "25P03"),
		&replica.StaleError{}, fmt.Errorf("gave up: %w", answer("ERROR", "40001")), pgconn.ErrConnClosed,
		&net.OpError{Op: "read", Err: errors.New("connection reset by peer")},
	} {
		require.True(t, metered.Retryable(err), err)
	}
	for _, err := range []error{
		answer("ERROR", "08P01"), answer("ERROR", "42501"), answer("ERROR", "57P04"), answer("ERROR", ""), answer("ERROR", "5"),
		&holds.TakenError{RetryAfter: time.Second}, &holds.StateError{State: holds.Expired}, metered.ErrConflict, metered.ErrRetired, metered.ErrFuture,
		metered.ErrTxFailed, metered.ErrResult, metered.ErrNested, budget.ErrClock, pgx.ErrNoRows, io.EOF,
	} {
		require.False(t, metered.Retryable(err), err)
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
		return c.Holds.Place(ctx, tx, holds.Request{ID: "h", TTL: time.Minute, Lines: []holds.Line{{Scope: placed, Amount: 1}}})
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

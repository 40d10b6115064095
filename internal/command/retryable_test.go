package command_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/tokens"
)

// Errors as they come, of a server that is used in all these ways.
func TestRetryable_IsTrueOfErrorsThatMayPass(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}, MaxAttempts: 1})
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
			other, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: "other"}})
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
		"sticky": {func(f *pgtest.Flush) bool { return f.Has(".charge_plain($1") }, metered.ErrSticky},
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
	require.True(t, metered.Retryable(errors.Join(budget.ErrConflict, context.DeadlineExceeded)))
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
		replica.ErrStale, fmt.Errorf("gave up: %w", answer("ERROR", "40001")), pgconn.ErrConnClosed,
		&net.OpError{Op: "read", Err: errors.New("connection reset by peer")},
	} {
		require.True(t, metered.Retryable(err), err)
	}
	for _, err := range []error{
		answer("ERROR", "08P01"), answer("ERROR", "42501"), answer("ERROR", "57P04"), answer("ERROR", ""), answer("ERROR", "5"),
		&holds.TakenError{RetryAfter: time.Second}, &holds.StateError{State: holds.Expired}, budget.ErrConflict, budget.ErrRetired, budget.ErrFuture,
		guardtx.ErrFailed, fault.New("invalid_result", ""), command.ErrNested, budget.ErrClock, pgx.ErrNoRows, io.EOF,
	} {
		require.False(t, metered.Retryable(err), err)
	}
}

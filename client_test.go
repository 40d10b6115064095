package metered_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestNew_RefusesWrongConfigAndReturnsNoClient(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]metered.Config{
		"Config.Schema":         {Schema: "A"},
		"Config.LockTimeout":    {LockTimeout: time.Hour + 1},
		"Config.ClockTolerance": {ClockTolerance: -1},
		"Config.MaxFuture":      {MaxFuture: 25 * time.Hour},
		"Config.MaxAttempts":    {MaxAttempts: 101},
		"Config.ResolveTimeout": {ResolveTimeout: -1},
		"Config.SecretKey":      {SecretKey: make([]byte, 32)},
		"Config.Prefix":         {TokenPrefix: "-"},
	} {
		c, err := metered.New(nowhere(t), cfg)
		require.ErrorIs(t, err, metered.ErrArgument, field)
		require.ErrorContains(t, err, field)
		require.Nil(t, c)
	}
	c, err := metered.New(nil, metered.Config{})
	require.ErrorIs(t, err, metered.ErrArgument)
	require.Nil(t, c)
	_, err = metered.New(nowhere(t), metered.Config{LockTimeout: time.Hour})
	require.NoError(t, err)
}

func TestRedeem_PrintsWithoutItsToken(t *testing.T) {
	t.Parallel()
	cmd := metered.Command{Token: &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: "metered_secret"}}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&out, verb+verb, cmd.Token, *cmd.Token)
	}
	for _, handler := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
		slog.New(handler).Info("x", "token", *cmd.Token, "pointer", cmd.Token, "command", cmd)
	}
	require.NoError(t, json.NewEncoder(&out).Encode(cmd))
	require.NotContains(t, out.String(), "secret")
	require.NotContains(t, out.String(), fmt.Sprintf("%x", "secret"))
	require.Contains(t, out.String(), "ann")
}

type foreign struct{}

func (foreign) Error() string { return "foreign" }
func (foreign) Code() string  { return "foreign" }

func TestCode_IsOfThisLibrarysErrorsOnly(t *testing.T) {
	t.Parallel()
	require.Empty(t, metered.Code(nil))
	require.Empty(t, metered.Code(foreign{}))
	require.Equal(t, "busy", metered.Code(errors.Join(foreign{}, fmt.Errorf("while: %w", metered.ErrBusy))))
}

func TestDo_WaitsForATokenNoLongerThanTheLockTimeoutWhateverTheDeadline(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{LockTimeout: 100 * time.Millisecond})
	presented := mint(t, pool, c)
	holder, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = holder.Rollback(context.Background()) }()
	_, err = c.Tokens.Consume(t.Context(), holder, "upload", "ann", presented)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = metered.Do(ctx, c, metered.Command{ID: "op", Token: redeem(presented)}, mustNotRun(t))
	require.ErrorIs(t, err, metered.ErrBusy)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
}

func TestDo_AStatementTimeoutOfTheFunctionsOwnIsNotTheDeadline(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Exec(ctx, `set local statement_timeout = '10ms'`)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `select pg_sleep(60)`)
		return nil, err
	}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op"}, fn)
	require.Error(t, err)
	require.NotErrorIs(t, err, metered.ErrTimeout)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
}

func TestPurgeOperations_WorksWhateverTheDefaultIsolation(t *testing.T) {
	t.Parallel()
	pool, c := setUpWith(t, metered.Config{}, pgtest.Options{Config: func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	}})
	clock := pgtest.SetClock(t, pool, monday)
	for i := range 40 {
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: fmt.Sprint(i), Isolation: pgx.ReadCommitted}, nil)
		require.NoError(t, err)
	}
	clock.Advance(time.Hour)
	inParallel(8, func(int) {
		if _, err := c.PurgeOperations(t.Context(), pool, metered.PurgeOptions{OlderThan: time.Minute, Batch: 3}); err != nil {
			t.Error(err)
		}
	})
	require.Zero(t, count(t, pool, "metered.operations"))
}

func TestDo_InsideACommandIsNested(t *testing.T) {
	t.Parallel()
	var c *metered.Client
	nested := func(ctx context.Context) {
		for _, ctx := range []context.Context{ctx, context.WithoutCancel(ctx)} {
			_, err := metered.Do(ctx, c, metered.Command{ID: "inner", Input: 1}, mustNotRun(t))
			require.ErrorIs(t, err, metered.ErrNested)
			require.Equal(t, "nested_command", metered.Code(err))
		}
	}
	subscriber := func(ctx context.Context, tx pgx.Tx, _ holds.Transition) error {
		nested(ctx)
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "inner", Input: 1}, mustNotRun(t))
		require.ErrorIs(t, err, metered.ErrNested)
		return nil
	}
	cfg := metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{subscriber}}}
	pool, made := setUpWith(t, cfg, pgtest.Options{MaxConns: 2})
	c = made
	ctx := t.Context()
	other := newClient(t, pool, metered.Config{})
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		nested(ctx)
		_, err := metered.Do[any](ctx, other, metered.Command{ID: metered.NewID(), Input: 1}, nil)
		require.NoError(t, err, "of another client")
		return placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 9)}})(ctx, tx)
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "outer", Input: 1}, fn)
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "outer, in a transaction", Input: 1}, fn)
		return err
	}))
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "inner", Input: 1}, nil)
	require.NoError(t, err, "afterwards")
}

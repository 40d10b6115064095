package command_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

func TestDo_WaitsForATokenNoLongerThanTheLockTimeout(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{LockTimeout: 100 * time.Millisecond}})
	presented := pgtest.Mint(t, pool, c)
	holder, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = holder.Rollback(context.Background()) }()
	_, err = c.Tokens.Consume(t.Context(), holder, "upload", "ann", presented)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = metered.Do(ctx, c, metered.Command{ID: "op", Token: pgtest.Redeem(presented)}, pgtest.MustNotRun(t))
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
}

func TestDo_AStatementTimeoutOfTheFunctionsOwnIsNotTheDeadline(t *testing.T) {
	t.Parallel()
	_, c := pgtest.SetUp(t, metered.Config{})
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

func TestPurgeOperations_WorksAtEachDefaultIsolation(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{}, pgtest.Options{Config: func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	}})
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(12))
	for i := range 40 {
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: fmt.Sprint(i), Isolation: pgx.ReadCommitted}, nil)
		require.NoError(t, err)
	}
	clock.Advance(time.Hour)
	pgtest.AtOnce(8, func(int) {
		if _, err := purge.Operations.Delete(t.Context(), pool, purge.Options{OlderThan: time.Minute, Batch: 3}); err != nil {
			t.Error(err)
		}
	})
	require.Zero(t, pgtest.Count(t, pool, "metered.operations"))
}

func TestDo_InsideACommandIsNested(t *testing.T) {
	t.Parallel()
	var c *metered.Client
	nested := func(ctx context.Context) {
		for _, ctx := range []context.Context{ctx, context.WithoutCancel(ctx)} {
			_, err := metered.Do(ctx, c, metered.Command{ID: "inner", Input: 1}, pgtest.MustNotRun(t))
			require.ErrorIs(t, err, command.ErrNested)
			require.Equal(t, "nested_command", metered.Code(err))
		}
	}
	subscriber := func(ctx context.Context, tx pgx.Tx, _ holds.Transition) error {
		nested(ctx)
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "inner", Input: 1}, pgtest.MustNotRun(t))
		require.ErrorIs(t, err, command.ErrNested)
		return nil
	}
	cfg := metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{subscriber}}}
	pool, made := pgtest.SetUp(t, cfg, pgtest.Options{MaxConns: 2})
	c = made
	ctx := t.Context()
	other := pgtest.NewClient(t, pool, metered.Config{})
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		nested(ctx)
		_, err := metered.Do[any](ctx, other, metered.Command{ID: metered.NewID(), Input: 1}, nil)
		require.NoError(t, err, "of another client")
		return pgtest.Placing(holds.Placement{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}})(ctx, tx)
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

// As a test of a program's own function might pass it.
func TestTx_TheZeroValueIsOver(t *testing.T) {
	t.Parallel()
	ctx, tx := t.Context(), &metered.Tx{}
	b := &pgx.Batch{}
	b.Queue("select 1")
	request, ids := holds.Placement{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute}, []string{"a"}
	for name, call := range map[string]func() error{
		"Exec":      func() error { _, err := tx.Exec(ctx, "select 1"); return err },
		"Query":     func() error { _, err := tx.Query(ctx, "select 1"); return err },
		"QueryRow":  func() error { return tx.QueryRow(ctx, "select 1").Scan() },
		"SendBatch": func() error { return tx.SendBatch(ctx, b).Close() },
		"Prepare":   func() error { _, err := tx.Prepare(ctx, "p", "select 1"); return err },
		"CopyFrom":  func() error { _, err := tx.CopyFrom(ctx, nil, nil, nil); return err },
		"Begin":     func() error { _, err := tx.Begin(ctx); return err },
		"Charge":    func() error { return tx.Charge(pgtest.Charge("s", 1, 0)) },
		"Credit":    func() error { return tx.Credit(budget.Credit{Scope: "s", Amount: 1}) },
		"Refund":    func() error { return tx.Refund(budget.Refund{Scope: "s", Seq: 1, Amount: 1}) },
		"Enqueue":   func() error { _, err := tx.Enqueue(ctx, pgtest.Process{}, nil); return err },
		"Secret":    func() error { _, err := tx.Secret("x"); return err },
		"Place":     func() error { _, err := tx.Place(ctx, request, nil); return err },
		"Claim":     func() error { _, err := tx.Claim(ctx, holds.Claim{}, nil); return err },
		"Capture":   func() error { return tx.Capture(holds.Capture{IDs: ids}) },
		"Release":   func() error { return tx.Release(holds.Release{IDs: ids}) },
		"Extend":    func() error { return tx.Extend(holds.Extend{IDs: ids, By: time.Second}) },
		"Return":    func() error { return tx.Return(holds.Return{IDs: ids}) },
	} {
		require.NotPanics(t, func() { require.ErrorIs(t, call(), guardtx.ErrDone, name) }, name)
	}
	require.NotPanics(t, func() { large := tx.LargeObjects(); _, _ = large.Create(ctx, 0) })
}

// A client can demand that each write says who acts, and that each scope was created.
func TestClient_CanDemandAnActorAndScopesThatExist(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{RequireActor: true, MustExist: true}})
	ctx := t.Context()
	ann := budget.Note{Actor: "ann"}
	do := func(fn func(tx pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, fn) }
	require.NoError(t, do(func(tx pgx.Tx) error { _, err := c.Budget.Create(ctx, tx, "s"); return err }))
	calls := map[string]func(tx pgx.Tx, scope string, note budget.Note) error{
		"charge": func(tx pgx.Tx, scope string, note budget.Note) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, Note: note})
			return err
		},
		"credit": func(tx pgx.Tx, scope string, note budget.Note) error {
			_, err := c.Budget.Credit(ctx, tx, budget.Credit{Scope: scope, Amount: 1, Note: note})
			return err
		},
		"place": func(tx pgx.Tx, scope string, note budget.Note) error {
			_, err := c.Holds.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 1}}, Note: note})
			return err
		},
		"capture more than is held": func(tx pgx.Tx, scope string, note budget.Note) error {
			h, err := c.Holds.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 1}}, Note: ann})
			if err == nil {
				_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{{Scope: scope, Amount: 2}}, Over: holds.OverAllowed, Note: note})
			}
			return err
		},
	}
	for name, call := range calls {
		require.NoError(t, do(func(tx pgx.Tx) error { return call(tx, "s", ann) }), name)
		require.ErrorIs(t, do(func(tx pgx.Tx) error { return call(tx, "s", budget.Note{}) }), budget.ErrArgument, name)
		require.ErrorIs(t, do(func(tx pgx.Tx) error { return call(tx, "mistyped", ann) }), budget.ErrScopeUnknown, name)
	}
	require.ErrorIs(t, do(func(tx pgx.Tx) error {
		_, err := c.Budget.Refund(ctx, tx, budget.Refund{Scope: "s", Seq: 1, Amount: 1})
		return err
	}), budget.ErrArgument)
	require.ErrorIs(t, do(func(tx pgx.Tx) error {
		_, err := c.Budget.RepairClock(ctx, tx, "s", budget.Note{})
		return err
	}), budget.ErrArgument)
}

package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/niltest"
)

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	pool := nowhere(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	tx, cmd := struct{ pgx.Tx }{}, metered.Command{ID: "a", Charges: []budget.Charge{charge("s", 1, 0)}}
	fn := mustNotRun(t)
	niltest.Methods(t, c, map[string][]any{
		"Lookup": {pool, "", "a"}, "PurgeOperations": {pool, metered.PurgeOptions{OlderThan: time.Hour}},
		"Secret": {"", "a", ""}, "RunTx": {pgx.TxOptions{}, func(context.Context, pgx.Tx) error { return nil }},
		"Listen": {pool, holds.ListenOptions{}, func(context.Context, metered.Notice) error { return nil }},
	})
	niltest.Func(t, "New", metered.New, pool, metered.Config{})
	niltest.Func(t, "Migrate", metered.Migrate, pool, metered.MigrateOptions{})
	niltest.Func(t, "Validate", metered.Validate, pool, "")
	niltest.Func(t, "DoTx", metered.DoTx[uploaded], niltest.Given{Arg: c}, tx, cmd, niltest.Given{Arg: fn})

	for what, c := range map[string]*metered.Client{"nil": nil, "zero": {}} {
		_, err := metered.Do(t.Context(), c, cmd, fn)
		requireField(t, err, "client", what)
		_, err = metered.DoTx(t.Context(), c, tx, cmd, fn)
		requireField(t, err, "client", what)
	}
}

func requireField(t *testing.T, err error, field, what string) {
	t.Helper()
	var argument *metered.ArgumentError
	require.ErrorAs(t, err, &argument, what)
	require.Equal(t, field, argument.Field, what)
}

// As a test of a program's own function might pass it.
func TestTx_TheZeroValueIsOver(t *testing.T) {
	t.Parallel()
	ctx, tx := t.Context(), &metered.Tx{}
	b := &pgx.Batch{}
	b.Queue("select 1")
	request, ids := holds.Request{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute}, []string{"a"}
	for name, call := range map[string]func() error{
		"Exec":         func() error { _, err := tx.Exec(ctx, "select 1"); return err },
		"Query":        func() error { _, err := tx.Query(ctx, "select 1"); return err },
		"QueryRow":     func() error { return tx.QueryRow(ctx, "select 1").Scan() },
		"SendBatch":    func() error { return tx.SendBatch(ctx, b).Close() },
		"Prepare":      func() error { _, err := tx.Prepare(ctx, "p", "select 1"); return err },
		"CopyFrom":     func() error { _, err := tx.CopyFrom(ctx, nil, nil, nil); return err },
		"Begin":        func() error { _, err := tx.Begin(ctx); return err },
		"Charge":       func() error { return tx.Charge(charge("s", 1, 0)) },
		"Credit":       func() error { return tx.Credit(budget.Credit{Scope: "s", Amount: 1}) },
		"RefundCharge": func() error { return tx.RefundCharge(budget.Refund{Scope: "s", Seq: 1, Amount: 1}) },
		"Enqueue":      func() error { _, err := tx.Enqueue(ctx, process{}, nil); return err },
		"Secret":       func() error { _, err := tx.Secret("x"); return err },
		"Place":        func() error { _, err := tx.Place(ctx, request, nil); return err },
		"Claim":        func() error { _, err := tx.Claim(ctx, holds.Claim{}, nil); return err },
		"Capture":      func() error { return tx.Capture(holds.Capture{IDs: ids}) },
		"Release":      func() error { return tx.Release(holds.Release{IDs: ids}) },
		"Extend":       func() error { return tx.Extend(holds.Extend{IDs: ids, By: time.Second}) },
		"Refund":       func() error { return tx.Refund(holds.Refund{IDs: ids}) },
	} {
		require.NotPanics(t, func() { require.ErrorIs(t, call(), metered.ErrTxDone, name) }, name)
	}
	require.NotPanics(t, func() { large := tx.LargeObjects(); _, _ = large.Create(ctx, 0) })
}

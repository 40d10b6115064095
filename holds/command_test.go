package holds_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestDo_PlacesCapturesAndReleasesWithTheChargesOrNothing(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	r := holds.Placement{ID: "h1", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}
	cmd := metered.Command{ID: "op1", Input: 1, Tenant: "acme", Charges: []budget.Charge{{Scope: "user/ann", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}
	out, err := metered.Do(ctx, c, cmd, pgtest.Placing(r))
	require.NoError(t, err)
	require.Equal(t, "h1", out.Result)
	require.Len(t, out.Holds, 1)
	require.True(t, out.Holds[0].Created)

	again, err := metered.Do(ctx, c, cmd, pgtest.Placing(r))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, out.Holds, again.Holds, "the hold as it was, in a replay too")
	op, err := c.Lookup(ctx, pool, "acme", "op1")
	require.NoError(t, err)
	require.Equal(t, again.Holds, op.Holds)

	history, err := c.Holds.History(ctx, pool, "", "h1", "")
	require.NoError(t, err)
	require.Equal(t, "op1", history[0].Operation)
	require.Equal(t, "acme", history[0].OperationTenant)

	// A refusal of the charge takes the hold back, and one of the hold the charge.
	other := r
	other.ID, other.Lines = "h2", []holds.Line{pgtest.Room("seat 2", 1, 1)}
	cmd.ID = "op2"
	_, err = metered.Do(ctx, c, cmd, pgtest.Placing(other))
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = c.Holds.Get(ctx, pool, "", "h2", "")
	require.ErrorIs(t, err, holds.ErrUnknown)
	r.ID = "h3"
	_, err = metered.Do(ctx, c, metered.Command{ID: "op3", Input: 1, Charges: []budget.Charge{{Scope: "user/ben", Amount: 1}}}, pgtest.Placing(r))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "seat", exceeded.Refusals[0].Scope)
	usage, err := c.Budget.Usage(ctx, pool, budget.Query{Scope: "user/ben"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Seq)
	_, err = c.Lookup(ctx, pool, "", "op3")
	require.ErrorIs(t, err, metered.ErrUnknownOperation)

	// In one command: capture one, release another, place a third.
	_, err = metered.Do(ctx, c, metered.Command{ID: "op4", Input: 1}, pgtest.Placing(other))
	require.NoError(t, err)
	third := r
	third.ID, third.Lines = "h4", []holds.Line{pgtest.Room("seat 2", 1, 1)}
	out4, err := metered.Do(ctx, c, metered.Command{ID: "op5", Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if err := tx.Capture(holds.Capture{IDs: []string{"h1"}, All: true, Entity: "ticket/1"}); err != nil {
			return nil, err
		}
		if err := tx.Release(holds.Release{IDs: []string{"h2"}}); err != nil {
			return nil, err
		}
		_, err := tx.Place(ctx, third, nil)
		return nil, err
	})
	require.NoError(t, err)
	require.Equal(t, []holds.State{holds.Captured, holds.Released, holds.Held},
		[]holds.State{out4.Holds[0].State, out4.Holds[1].State, out4.Holds[2].State})

	// A refusal of the second takes the first back.
	_, err = metered.Do(ctx, c, metered.Command{ID: "op6", Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if err := tx.Capture(holds.Capture{IDs: []string{"h4"}, All: true}); err != nil {
			return nil, err
		}
		return nil, tx.Release(holds.Release{IDs: []string{"h1"}})
	})
	require.ErrorIs(t, err, inState(holds.Captured))
	h, err := c.Holds.Get(ctx, pool, "", "h4", "")
	require.NoError(t, err)
	require.Equal(t, holds.Held, h.State)

	// A place that repeats the id of a hold that has ended.
	r.ID = "h1"
	_, err = metered.Do(ctx, c, metered.Command{ID: "op7", Input: 1}, pgtest.Placing(r))
	require.ErrorIs(t, err, inState(holds.Captured))
	require.NotErrorIs(t, err, metered.ErrIndefinite)
}

func TestOnRefusal_HearsOfEveryRefusalOfAHold(t *testing.T) {
	t.Parallel()
	var refused []error
	_, c := pgtest.SetUp(t, metered.Config{OnRefusal: func(_ context.Context, d metered.RefusedCommand) { refused = append(refused, d.Err) }})
	ctx := t.Context()
	do := func(id string, f func(tx *metered.Tx) error) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: id, Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) { return nil, f(tx) })
		return err
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "op1", Input: 1}, pgtest.Placing(holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}))
	require.NoError(t, err)
	want := []error{holds.ErrExcess, holds.ErrCeiling, holds.ErrExcess, budget.ErrRefundExceeds}
	require.ErrorIs(t, do("op2", func(tx *metered.Tx) error {
		return tx.Capture(holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "seat", Amount: 2}}})
	}), holds.ErrExcess)
	require.ErrorIs(t, do("op2", func(tx *metered.Tx) error {
		return tx.Extend(holds.Extend{IDs: []string{"h"}, By: 24 * time.Hour})
	}), holds.ErrCeiling)
	require.NoError(t, do("op3", func(tx *metered.Tx) error { return tx.Capture(holds.Capture{IDs: []string{"h"}, All: true}) }))
	require.NoError(t, do("op4", func(tx *metered.Tx) error {
		return tx.Refund(budget.Refund{Scope: "seat", Seq: 2, Amount: 1})
	}))
	require.ErrorIs(t, do("op5", func(tx *metered.Tx) error {
		return tx.Return(holds.Return{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "seat", Amount: 1}}})
	}), holds.ErrExcess)
	require.ErrorIs(t, do("op5", func(tx *metered.Tx) error {
		return tx.Refund(budget.Refund{Scope: "seat", Seq: 2, Amount: 1})
	}), budget.ErrRefundExceeds)
	require.Len(t, refused, len(want))
	for i := range want {
		require.ErrorIs(t, refused[i], want[i])
	}
}

// Several calls first lock the scopes of the holds that they name. Unknown holds have none.
func TestDo_UnknownHoldsAreUnknownAlsoIfThereAreSeveral(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	fn := func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, errors.Join(tx.Release(holds.Release{IDs: []string{"a"}}), tx.Capture(holds.Capture{IDs: []string{"b"}, All: true}))
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1}, fn)
	require.ErrorIs(t, err, holds.ErrUnknown)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op", Input: 1}, fn)
		require.ErrorIs(t, err, holds.ErrUnknown)
		_, err = tx.Exec(ctx, "select metered.lock_all('{}', '{}', '{}', '{}', 1)")
		return err
	}))
}

// A wait for scopes must not show that somebody else's hold exists.
func TestDo_WaitsForNothingOfAnothersHold(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}})
	r := holds.Placement{ID: "h", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op1", Input: 1}, pgtest.Placing(r))
	require.NoError(t, err)
	pgtest.LockScope(t, pool, c, "seat")
	for _, test := range []struct {
		id, holder string
		want       error
	}{{"h", "ben", holds.ErrUnknown}, {"none", "ben", holds.ErrUnknown}, {"none", "", holds.ErrUnknown}, {"h", "ann", budget.ErrBusy}, {"h", "", budget.ErrBusy}} {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: "op2", Input: 1, Charges: []budget.Charge{pgtest.Charge("fee", 1, 0)}},
			func(_ context.Context, tx *metered.Tx) (any, error) {
				return nil, tx.Release(holds.Release{IDs: []string{test.id}, Holder: test.holder})
			})
		require.ErrorIs(t, err, test.want, "%+v", test)
	}
}

func (transition) Kind() string { return "transition" }

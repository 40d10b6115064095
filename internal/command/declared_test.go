package command_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func seat(number, holder string) holds.Claim {
	return holds.Claim{Tenant: "hall", Key: holds.Key{Type: "seat", Value: number}, Holder: holder, TTL: time.Minute}
}

// The hold of seat 21A is no answer to who asks for 22B under the same id, in any of the ways to ask.
func TestCommand_TheSameIDForAnotherHoldIsAConflict(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			ctx := t.Context()
			first := metered.Command{
				ID: string(level), Isolation: level,
				Claims: []holds.Claim{seat("21A", "ann")},
				Holds:  []holds.Placement{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 2, 9)}}},
			}
			out, err := metered.Do[any](ctx, c, first, nil)
			require.NoError(t, err)
			require.Equal(t, []string{"power", "claim"}, []string{out.Holds[0].Lines[0].Scope, out.Holds[1].Lines[0].Scope[:5]})
			same := first
			same.Claims = []holds.Claim{seat("21A", "ann")}
			same.Claims[0].TTL = time.Hour // when it ends, and how much there is, may change between the calls
			same.Holds = []holds.Placement{{Holder: "ann", TTL: time.Hour, Lines: []holds.Line{room("power", 2, 5)}}}
			again, err := metered.Do[any](ctx, c, same, nil)
			require.NoError(t, err)
			require.True(t, again.Replayed)
			require.Equal(t, out.Holds, again.Holds)

			for name, change := range map[string]func(*metered.Command){
				"another seat":   func(cmd *metered.Command) { cmd.Claims = []holds.Claim{seat("22B", "ann")} },
				"another holder": func(cmd *metered.Command) { cmd.Claims = []holds.Claim{seat("21A", "ben")} },
				"another tenant": func(cmd *metered.Command) { cmd.Claims = []holds.Claim{seat("21A", "ann")}; cmd.Claims[0].Tenant = "" },
				"no claim":       func(cmd *metered.Command) { cmd.Claims = nil },
				"one claim more": func(cmd *metered.Command) { cmd.Claims = append(cmd.Claims[:1:1], seat("22B", "ann")) },
				"another amount": func(cmd *metered.Command) {
					cmd.Holds = []holds.Placement{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 3, 9)}}}
				},
				"another scope": func(cmd *metered.Command) {
					cmd.Holds = []holds.Placement{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("water", 2, 9)}}}
				},
				"an id": func(cmd *metered.Command) {
					cmd.Holds = []holds.Placement{{ID: "h", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 2, 9)}}}
				},
				"a charge with it": func(cmd *metered.Command) {
					cmd.Holds = []holds.Placement{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 2, 9)}, Charges: []budget.Charge{charge("fee", 1, 0)}}}
				},
			} {
				cmd := first
				change(&cmd)
				_, err := metered.Do[any](ctx, c, cmd, nil)
				require.ErrorIs(t, err, budget.ErrConflict, name)
			}
		})
	}
}

// Input stands for the holds, charges and other calls of a function: without an Input they are refused, and the same
// id with another Input is a conflict.
func TestTx_CallsOfTheFunctionNeedAnInput(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for name, call := range map[string]func(ctx context.Context, tx *metered.Tx) error{
		"Place": func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Place(ctx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{room("a", 1, 9)}}, nil)
			return err
		},
		"Claim": func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Claim(ctx, seat("21A", "ann"), nil)
			return err
		},
		"Capture": func(_ context.Context, tx *metered.Tx) error {
			return tx.Capture(holds.Capture{IDs: []string{"h"}, All: true})
		},
		"Release": func(_ context.Context, tx *metered.Tx) error { return tx.Release(holds.Release{IDs: []string{"h"}}) },
		"Extend": func(_ context.Context, tx *metered.Tx) error {
			return tx.Extend(holds.Extend{IDs: []string{"h"}, By: time.Second})
		},
		"Return": func(_ context.Context, tx *metered.Tx) error {
			return tx.Return(holds.Return{IDs: []string{"h"}, All: true})
		},
		"Charge": func(_ context.Context, tx *metered.Tx) error { return tx.Charge(charge("a", 1, 0)) },
		"Credit": func(_ context.Context, tx *metered.Tx) error { return tx.Credit(budget.Credit{Scope: "a", Amount: 1}) },
		"Refund": func(_ context.Context, tx *metered.Tx) error {
			return tx.Refund(budget.Refund{Scope: "a", Seq: 1, Amount: 1})
		},
	} {
		_, err := metered.Do(ctx, c, metered.Command{ID: name}, func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, call(ctx, tx) })
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument, name)
		require.Equal(t, "Command.Input", argument.Field, name)
	}
	require.Zero(t, count(t, pool, "metered.operations"))

	claim := func(number string) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: number}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			return tx.Claim(ctx, seat(number, "ann"), nil)
		})
		return err
	}
	require.NoError(t, claim("21A"))
	require.ErrorIs(t, claim("22B"), budget.ErrConflict)
}

// A command that declares its holds is refused before its function runs, in the flush that begins it.
func TestCommand_DeclaredHoldsAreLookedAtEarly(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	one := func(holder string) []holds.Placement {
		return []holds.Placement{{ID: "h", Holder: holder, TTL: time.Minute, Lines: []holds.Line{room("stock", 1, 1)}}}
	}
	for i, holder := range []string{"ann", "ann"} { // her own hold is not in her way
		out, err := metered.Do[any](ctx, c, metered.Command{ID: fmt.Sprint(i), Holds: one(holder), Claims: []holds.Claim{seat("21A", holder)}}, nil)
		require.NoError(t, err)
		require.Equal(t, i == 0, out.Holds[0].Created)
	}
	for name, cmd := range map[string]metered.Command{
		"refused":        {Holds: []holds.Placement{{TTL: time.Minute, Lines: []holds.Line{room("stock", 1, 1)}}}},
		"taken":          {Claims: []holds.Claim{seat("21A", "ben")}},
		"taken, sticky":  {Claims: []holds.Claim{seat("21A", "ben")}, Sticky: tries},
		"the line of it": {Claims: []holds.Claim{{Key: holds.Key{Type: "seat", Value: "23C"}, Holder: "ben", TTL: time.Minute, Lines: []holds.Line{room("stock", 1, 1)}}}},
	} {
		cmd.ID = name
		_, err := metered.Do(ctx, c, cmd, mustNotRun(t))
		late := func(ctx context.Context, tx *metered.Tx) (s string, err error) {
			for _, r := range cmd.Holds {
				s, err = tx.Place(ctx, r, nil)
			}
			for _, r := range cmd.Claims {
				s, err = tx.Claim(ctx, r, nil)
			}
			return s, err
		}
		_, lateErr := metered.Do(ctx, c, metered.Command{ID: name, Input: 1}, late)
		require.NotEmpty(t, metered.Code(err), name)
		require.Equal(t, metered.Code(lateErr), metered.Code(err), name)
		require.IsType(t, lateErr, err, name)
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Holds.Release(ctx, tx, holds.Release{IDs: []string{"h"}})
		return err
	}))
	_, err := metered.Do(ctx, c, metered.Command{ID: "refused", Holds: one("ben")[:1]}, placedIDs)
	require.ErrorIs(t, err, holds.ErrConflict, "its id is ann's: only placing tells")
}

func placedIDs(_ context.Context, tx *metered.Tx) (int, error) { return len(tx.Placed), nil }

// The first look asks nothing for a repetition: whatever stands in the way by now, it gets the first result. An error of the
// look has the code that it would have later.
func TestCommand_DeclaredHoldsDoNotKeepAReplayFromItsAnswer(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	cmd := metered.Command{ID: "op", Holds: []holds.Placement{{TTL: time.Minute, Lines: []holds.Line{
		{Scope: "s", Amount: 1, Limits: []budget.Limit{budget.PerWindow(9, time.Hour)}}}}}}
	out, err := metered.Do[any](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	clock.Advance(-time.Hour)
	again, err := metered.Do[any](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, out.Holds, again.Holds)
	cmd.ID = "another"
	_, err = metered.Do(t.Context(), c, cmd, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrClock)
}

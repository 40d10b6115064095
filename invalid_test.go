package metered_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/tokens"
)

// nowhere is a pool whose every use fails the test.
func nowhere(t *testing.T) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		t.Error("there was an attempt to connect")
		return nil, net.ErrClosed
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestDo_WrongArgumentsAreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	c, err := metered.New(nowhere(t), metered.Config{})
	require.NoError(t, err)
	long := strings.Repeat("x", 256)
	good := unknownToken(t, c)
	many := make([]budget.Charge, budget.MaxScopes+1)
	for i := range many {
		many[i] = charge(strings.Repeat("s", i+1), 1, 0)
	}
	for _, test := range []struct {
		cmd   metered.Command
		field string // "" is for errors of the pieces
		err   error
	}{
		{metered.Command{}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: long}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: "a\xff"}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: "a\x00"}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: "a", Namespace: long}, "Command.Namespace", metered.ErrArgument},
		{metered.Command{ID: "a", Namespace: "\x00"}, "Command.Namespace", metered.ErrArgument},
		{metered.Command{ID: "a", Name: long}, "Command.Name", metered.ErrArgument},
		{metered.Command{ID: "a", Name: "\xc3"}, "Command.Name", metered.ErrArgument},
		{metered.Command{ID: "a", Input: make(chan int)}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: math.Inf(1)}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: "a\xff"}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: map[string]any{"\xff": 1}}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: []any{json.RawMessage("\"\xff\"")}}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: make([]byte, 1<<20+1)}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", IssuedAt: time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)}, "Command.IssuedAt", metered.ErrArgument},
		{metered.Command{ID: "a", IssuedAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, "Command.IssuedAt", metered.ErrArgument},
		{metered.Command{ID: "ffffffff-ffff-7fff-bfff-ffffffffffff"}, "Command.IssuedAt", metered.ErrArgument},
		{metered.Command{ID: "a", Isolation: "snapshot"}, "Command.Isolation", metered.ErrArgument},
		{metered.Command{ID: "a", Isolation: "read uncommitted"}, "Command.Isolation", metered.ErrArgument},
		{metered.Command{ID: "a", Charges: []budget.Charge{charge("", 1, 0)}}, "charges[0].Scope", budget.ErrArgument},
		{metered.Command{ID: "a", Charges: []budget.Charge{charge("s", 1, 0), charge("s", 0, 0)}}, "charges[1].Amount", budget.ErrArgument},
		{metered.Command{ID: "a", Charges: many}, "charges", budget.ErrArgument},
		{metered.Command{ID: "a", Sticky: []budget.Charge{{Scope: "s", Amount: 1, Limits: []budget.Limit{budget.Lifetime(-1)}}}}, "charges[0].Limits[0].Max", budget.ErrArgument},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: "x"}}, "", tokens.ErrInvalid},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: good + "x"}}, "", tokens.ErrInvalid},
		{metered.Command{ID: "a", Token: &metered.Redeem{Subject: "s", Presented: good}}, "purpose", tokens.ErrArgument},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Presented: good}}, "subject", tokens.ErrArgument},
	} {
		_, err := metered.Do(t.Context(), c, test.cmd, mustNotRun(t))
		require.ErrorIs(t, err, test.err, "%+v", test.cmd)
		require.NotEmpty(t, metered.Code(err))
		if test.field != "" {
			var argument *metered.ArgumentError
			require.True(t, errors.As(err, &argument), "%v", err)
			require.Equal(t, test.field, argument.Field)
			require.ErrorContains(t, err, test.field)
		}
	}
}

func TestDo_WhatIsJustWithinBoundsIsTaken(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	longest := strings.Repeat("é", 127) + "x"
	first, last := time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
	for _, test := range []struct {
		cmd metered.Command
		err error
	}{
		{metered.Command{ID: longest, Namespace: longest, Name: longest, Input: make([]byte, 1<<20)}, nil},
		{metered.Command{ID: "a", IssuedAt: first}, nil},
		{metered.Command{ID: "b", IssuedAt: last}, metered.ErrFuture},
		{metered.Command{ID: metered.NewID(), IssuedAt: last}, nil}, // the time in the id is what counts
	} {
		_, err := metered.Do[any](t.Context(), c, test.cmd, nil)
		require.ErrorIs(t, err, test.err)
	}
}

func TestPurgeOperations_WrongOptionsAreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	c, err := metered.New(nowhere(t), metered.Config{})
	require.NoError(t, err)
	for _, opts := range []metered.PurgeOptions{
		{}, {OlderThan: time.Second - 1}, {OlderThan: budget.MaxWindow + 1}, {OlderThan: time.Hour, Batch: -1}, {OlderThan: time.Hour, Batch: 10_001},
	} {
		_, err := c.PurgeOperations(t.Context(), nowhere(t), opts)
		require.ErrorIs(t, err, metered.ErrArgument, "%+v", opts)
	}
}

func TestLookup_AWrongIDIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool := nowhere(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	for _, id := range [][2]string{{"", ""}, {"\x00", "a"}, {"", "\xff"}, {"", strings.Repeat("x", 256)}} {
		_, err := c.Lookup(t.Context(), pool, id[0], id[1])
		require.ErrorIs(t, err, metered.ErrArgument, "%q", id)
	}
}

func TestNew_WrongConfigIsRefused(t *testing.T) {
	t.Parallel()
	pool := nowhere(t)
	for field, cfg := range map[string]metered.Config{
		"Config.Schema":         {Schema: "No"},
		"Config.TokenPrefix":    {TokenPrefix: "no spaces"},
		"Config.SecretKey":      {SecretKey: []byte("short")},
		"Config.LockTimeout":    {LockTimeout: time.Hour + 1},
		"Config.ClockTolerance": {ClockTolerance: -1},
		"Config.MaxFuture":      {MaxFuture: 24*time.Hour + 1},
		"Config.MaxAttempts":    {MaxAttempts: 101},
		"Config.ResolveTimeout": {ResolveTimeout: -1},
	} {
		_, err := metered.New(pool, cfg)
		var argument *metered.ArgumentError
		require.ErrorAs(t, err, &argument, field)
		require.NotEmpty(t, metered.Code(err))
	}
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	_, err = c.Secret("", "op", "")
	require.ErrorIs(t, err, metered.ErrArgument, "no key")
}

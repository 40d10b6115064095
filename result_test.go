package metered_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// oneWay goes to JSON and does not come back.
type oneWay struct{}

func (oneWay) MarshalJSON() ([]byte, error) { return []byte(`"x"`), nil }
func (*oneWay) UnmarshalJSON([]byte) error  { return errors.New("one way") }

func TestDo_AResultThatCannotBeReplayedCommitsNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for what, do := range map[string]func(cmd metered.Command) error{
		"a channel":         resulting(c, make(chan int)),
		"a function":        resulting(c, func() {}),
		"not a number":      resulting(c, math.NaN()),
		"one way":           resulting(c, oneWay{}),
		"an interface":      resulting[fmt.Stringer](c, time.Second),
		"an error":          resulting(c, errOwn), // {}, which does not come back as an error
		"not UTF-8":         resulting(c, uploaded{"\xff"}),
		"not UTF-8, as key": resulting(c, map[string]int{"\xff": 1}),
		"not UTF-8, raw":    resulting(c, json.RawMessage("\"\xff\"")),
		"one byte too long": resulting(c, strings.Repeat("x", 1<<20-1)),
	} {
		cmd := whole(t, pool, c, what)
		err := do(cmd)
		require.ErrorIs(t, err, metered.ErrResult, what)
		require.Equal(t, "invalid_result", metered.Code(err))
		require.Equal(t, nothing, footprintOf(t, pool, cmd), what)
	}
	cmd := whole(t, pool, c, "as long as it may be")
	require.NoError(t, resulting(c, strings.Repeat("x", 1<<20-2))(cmd))
	require.Equal(t, everything, footprintOf(t, pool, cmd))
}

func resulting[R any](c *metered.Client, result R) func(metered.Command) error {
	return func(cmd metered.Command) error {
		_, err := metered.Do(context.Background(), c, cmd, func(ctx context.Context, tx *metered.Tx) (R, error) {
			_, err := wholeFunc(cmd.ID, nil)(ctx, tx)
			return result, err
		})
		return err
	}
}

func TestDo_TheFirstResultIsWhatAReplayWillReturn(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	type result struct {
		At      time.Time
		Any     any
		Text    string
		hidden  int
		Private int `json:"-"`
	}
	cmd := metered.Command{ID: "op", Input: "\ufffd"}
	fn := func(context.Context, *metered.Tx) (result, error) {
		return result{At: time.Now(), Any: 7, Text: "a\ufffd", hidden: 1, Private: 2}, nil
	}
	first, err := metered.Do(t.Context(), c, cmd, fn)
	require.NoError(t, err)
	require.Equal(t, float64(7), first.Result.Any)
	require.Equal(t, "a\ufffd", first.Result.Text)
	require.Zero(t, first.Result.hidden+first.Result.Private)
	again, err := metered.Do(t.Context(), c, cmd, fn)
	require.NoError(t, err)
	require.Equal(t, first.Result, again.Result)

	_, err = metered.Do(t.Context(), c, cmd, func(context.Context, *metered.Tx) (int, error) { return 0, nil })
	require.ErrorIs(t, err, metered.ErrResult, "the record does not fit another type")
}

func TestDo_WithoutAFunctionJustCharges(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	before := queryRow[time.Time](t, pool, "select clock_timestamp()")
	cmd := metered.Command{ID: "op", Charges: []budget.Charge{charge("t", 2, 0), charge("s", 3, 10), charge("t", 5, 0)}}
	out, err := metered.Do[struct{}](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	require.JSONEq(t, "{}", string(out.Raw))
	require.Equal(t, int64(3), used(t, pool, c, "s"))
	require.Equal(t, int64(7), used(t, pool, c, "t"))

	// In the order of their first mention, added up by scope.
	require.Len(t, out.Receipt.Entries, 2)
	require.Equal(t, "t", out.Receipt.Entries[0].Scope)
	require.Equal(t, int64(7), out.Receipt.Entries[0].Amount)
	require.Empty(t, out.Receipt.Entries[0].Standings)
	require.Equal(t, int64(7), out.Receipt.Entries[1].Standings[0].Available)
	require.Equal(t, int64(1), out.Receipt.Entries[1].Seq)
	require.False(t, out.At.Before(before))

	free, err := metered.Do[struct{}](t.Context(), c, metered.Command{ID: "free"}, nil)
	require.NoError(t, err)
	require.Empty(t, free.Receipt.Entries)
	again, err := metered.Do[struct{}](t.Context(), c, metered.Command{ID: "free"}, nil)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Empty(t, again.Receipt.Entries)
}

func TestDo_ChargesOfTheFunctionAddToThoseDeclared(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{charge("s", 2, 10)}}
	out, err := metered.Do(t.Context(), c, cmd, func(_ context.Context, tx *metered.Tx) (any, error) {
		require.NoError(t, tx.Charge(charge("s", 3, 10), charge("t", 1, 0)))
		require.ErrorIs(t, tx.Charge(charge("", 1, 0)), budget.ErrArgument) // and leaves the others
		return nil, tx.Charge(charge("s", 5, 10))
	})
	require.NoError(t, err)
	require.Equal(t, int64(10), out.Receipt.Entries[0].Amount)
	require.Equal(t, int64(10), used(t, pool, c, "s"))
	require.Equal(t, int64(1), used(t, pool, c, "t"))
	require.Equal(t, "op", queryRow[string](t, pool, "select operation from metered.ledger where scope = 't'"))
	require.Equal(t, []byte("null"), []byte(out.Raw))
}

func TestLookup_ReturnsTheRecord(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := c.Lookup(ctx, pool, "ns", "op")
	require.ErrorIs(t, err, metered.ErrUnknownOperation)
	issued := time.Now().Truncate(time.Microsecond)
	cmd := metered.Command{Namespace: "ns", ID: "op", IssuedAt: issued, Charges: []budget.Charge{charge("s", 3, 10)}}
	out, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := c.Lookup(ctx, pool, "ns", "op") // does not wait
		require.ErrorIs(t, err, metered.ErrUnknownOperation)
		return upload("a")(ctx, tx)
	})
	require.NoError(t, err)
	op, err := c.Lookup(ctx, pool, "ns", "op")
	require.NoError(t, err)
	require.Equal(t, json.RawMessage(`{"name":"a"}`), op.Result)
	require.True(t, op.At.Equal(out.At))
	require.True(t, op.IssuedAt.Equal(issued))
	require.Equal(t, out.Receipt.Entries[0].Seq, op.Receipt.Entries[0].Seq)
	require.Equal(t, "ns", op.Namespace)
	_, err = c.Lookup(ctx, pool, "", "op")
	require.ErrorIs(t, err, metered.ErrUnknownOperation)

	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "mine"}, upload("b"))
		require.NoError(t, err)
		op, err := c.Lookup(ctx, tx, "", "mine")
		require.True(t, op.IssuedAt.IsZero())
		require.Empty(t, op.Receipt.Entries)
		return err
	}))
}

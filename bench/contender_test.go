package main

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func quiet(connString string) *bench {
	b := newBench(true, connString)
	b.log, b.owned = io.Discard, true
	return b
}

func TestComparison_RunsContendersInTurns(t *testing.T) {
	t.Parallel()
	var order string
	op := func(name string) contender {
		return contender{name: name, op: func(context.Context, int) error { order += name; return nil }}
	}
	c := comparison{contenders: []contender{op("a"), op("b"), op("c")}, clients: 1, count: 1, rounds: 3}
	out, err := c.run(t.Context(), quiet(""))
	require.NoError(t, err)
	require.Equal(t, "abc"+"bca"+"cab"+"abc", order)
	require.Len(t, out.rates["a"], 3, "the first round is not counted")
	require.Equal(t, []string{"a", "b", "c"}, out.names)
}

func TestOutcome_RatiosAreTakenInEachRound(t *testing.T) {
	t.Parallel()
	o := outcome{names: []string{"c", "b", "d", "a"}, rates: map[string][]float64{"a": {10, 1, 30}, "b": {5, 4, 10}}}
	require.Equal(t, []float64{2, 0.25, 3}, o.ratio("a", "b").values)
	require.Equal(t, []float64{0.5, 4, 10.0 / 30}, o.cost("a", "b").values)
	o.where = []profile{{contender: "c"}, {contender: "b"}, {contender: "d"}, {contender: "a"}}
	require.Equal(t, []profile{{contender: "a"}, {contender: "b"}, {contender: "c"}, {contender: "d"}}, o.ratio("a", "b").where)
}

func TestDrive_StopsAtTheLimitAndCountsItsOps(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	n, _, err := drive(t.Context(), func(context.Context, int) error { calls.Add(1); return nil }, 8, time.Minute, 100)
	require.NoError(t, err)
	require.Equal(t, 100, n)
	require.EqualValues(t, 100, calls.Load())

	left := atomic.Int64{}
	left.Store(7)
	n, _, err = drive(t.Context(), func(context.Context, int) error {
		if left.Add(-1) < 0 {
			return errOut
		}
		return nil
	}, 3, time.Minute, 0)
	require.NoError(t, err)
	require.Equal(t, 7, n)
}

func TestDrive_EndsAtTheFirstError(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	_, _, err := drive(t.Context(), func(context.Context, int) error { return broken }, 4, time.Minute, 0)
	require.ErrorIs(t, err, broken)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = drive(ctx, func(context.Context, int) error { return nil }, 4, time.Minute, 0)
	require.ErrorIs(t, err, context.Canceled)
}

func TestQuantile_Interpolates(t *testing.T) {
	t.Parallel()
	require.Zero(t, median(nil))
	require.Equal(t, 2.0, median([]float64{3, 1, 2}))
	require.Equal(t, 2.5, median([]float64{4, 1, 2, 3}))
	require.Equal(t, 1.75, quantile([]float64{4, 1, 2, 3}, 0.25))
	require.Equal(t, 4.0, quantile([]float64{4, 1, 2, 3}, 1))
}

func TestMeasure_AFigureThatFailsDoesNotTakeTheOthersAlong(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	results, err := quiet("").measure(t.Context(), []figure{
		{name: "broken", measure: func(context.Context, *bench) (samples, error) { return samples{}, broken }},
		{name: "works", measure: func(context.Context, *bench) (samples, error) { return samples{values: []float64{1}}, nil }},
	})
	require.ErrorIs(t, err, broken)
	require.Len(t, results, 2)
	require.Contains(t, results[0].notRun, "broken")
	require.Equal(t, []float64{1}, results[1].values)
}

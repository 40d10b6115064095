package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

type usage struct {
	Tokens int64 `json:"tokens"`
}

// stream reserves 100 of user's 1000 tokens, and charges a request.
func stream(id string) metered.Reservation {
	return metered.Reservation{
		ID: id, Namespace: "acme", Name: "chat", Input: "hello",
		Lines:   []holds.Line{{Scope: "tokens", Amount: 100, Limits: []budget.Limit{budget.Lifetime(1000)}}},
		Charges: []budget.Charge{{Scope: "requests", Amount: 1}},
	}
}

func tokensUsed(n int64) metered.Used {
	return metered.Used{Lines: []holds.Line{{Scope: "tokens", Amount: n}}}
}

func says(n int64) metered.Func[usage] {
	return func(context.Context, *metered.Tx) (usage, error) { return usage{n}, nil }
}

// stands is what is used of a scope, and what is held.
func stands(t *testing.T, pool *pgxpool.Pool, c *metered.Client, scope string) [2]int64 {
	t.Helper()
	all, err := c.Budget.Usage(context.Background(), pool, budget.Query{Scope: scope, Window: budget.Forever})
	require.NoError(t, err)
	return [2]int64{all[0].Used, all[0].Held}
}

func TestOpen_ReservesAndSettleCapturesWhatWasUsed(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	s, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	defer s.Close()
	require.False(t, s.Finished())
	require.Equal(t, [2]int64{0, 100}, stands(t, pool, c, "tokens"))
	require.EqualValues(t, 1, used(t, pool, c, "requests"))
	var running *metered.RunningError
	_, err = metered.Open[usage](t.Context(), c, stream("1"))
	require.ErrorAs(t, err, &running)
	require.InDelta(t, 75, running.RetryAfter.Seconds(), 10)

	out, err := s.Settle(t.Context(), tokensUsed(30), says(30))
	require.NoError(t, err)
	require.False(t, out.Replayed)
	require.EqualValues(t, 30, out.Result.Tokens)
	require.EqualValues(t, 30, out.Holds[0].Lines[0].Captured)
	require.ErrorIs(t, context.Cause(s.Context()), context.Canceled)
	require.Equal(t, [2]int64{30, 0}, stands(t, pool, c, "tokens"))

	again, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	defer again.Close()
	require.True(t, again.Finished())
	require.Equal(t, usage{30}, again.Outcome().Result)
	require.True(t, again.Outcome().Replayed)
	require.ErrorIs(t, context.Cause(again.Context()), metered.ErrFinished)
	require.EqualValues(t, 30, used(t, pool, c, "tokens"))
	require.EqualValues(t, 1, used(t, pool, c, "requests"))

	settled, err := s.Settle(t.Context(), tokensUsed(30), says(30))
	require.NoError(t, err)
	require.True(t, settled.Replayed)
	require.ErrorIs(t, s.Cancel(t.Context(), "late"), metered.ErrLost)
}

func TestOpen_CancelFreesAndTheSameIDRunsAnew(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	s, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	require.NoError(t, s.Cancel(t.Context(), "no answer"))
	require.NoError(t, s.Cancel(t.Context(), "no answer"))
	require.Zero(t, stands(t, pool, c, "tokens"))
	require.EqualValues(t, 1, used(t, pool, c, "requests"))

	other, err := metered.Open[usage](t.Context(), c, stream("1"))
	require.NoError(t, err)
	_, err = s.Settle(t.Context(), tokensUsed(7), says(7))
	var lost *metered.LostError
	require.ErrorAs(t, err, &lost)
	require.ErrorIs(t, lost.Cause, holds.ErrReleased)
	_, err = other.Settle(t.Context(), tokensUsed(8), says(8))
	require.NoError(t, err)
	_, err = s.Settle(t.Context(), tokensUsed(7), says(7))
	require.ErrorAs(t, err, &lost)
	require.EqualValues(t, 8, used(t, pool, c, "tokens"))
	require.EqualValues(t, 2, used(t, pool, c, "requests"))
}

func TestOpen_RenewsItsHold(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	r := stream("1")
	r.TTL = time.Second
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	first := s.Hold().Deadline
	require.Eventually(t, func() bool { return s.Hold().Deadline.Sub(first) > 2*time.Second }, 2*time.Minute, 10*time.Millisecond)
	require.NoError(t, s.Context().Err())
	_, err = s.Settle(t.Context(), tokensUsed(3), says(3))
	require.NoError(t, err)
}

package leases

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// A refusal is remembered for seconds, however far its retry time, and for the amount that was asked.
func TestSlot_ARefusalIsRememberedForSecondsAndForItsAmount(t *testing.T) {
	t.Parallel()
	month := budget.Per(10, budget.Month, time.UTC, time.Time{})
	refused := func(amount int64, limit budget.Limit, after time.Duration) *budget.ExceededError {
		return &budget.ExceededError{Refusals: []budget.Refusal{
			{Limit: limit, Requested: amount, RetryAfter: after}, {Limit: limit, Requested: amount, RetryAfter: after / 2}}}
	}
	s := &slot{rule: &Rule{RememberRefusal: 100 * time.Millisecond}}
	for _, c := range []struct {
		amount       int64
		limit        budget.Limit
		after, lasts time.Duration
		sure         bool
	}{
		{1, month, 695 * time.Hour, sureFor, true},
		{2, month, 700 * time.Hour, sureFor, true},
		{11, month, budget.Never, sureFor, true},
		{3, month, time.Second, time.Second, true},
		{4, budget.Lifetime(10), budget.Never, 100 * time.Millisecond, false},
		{5, month, 0, 0, true},
	} {
		before := time.Now()
		s.refuse(c.amount, refused(c.amount, c.limit, c.after))
		r := (*s.refused.Load())[0]
		require.Equal(t, c.sure, r.sure)
		require.WithinRange(t, r.until, before.Add(c.lasts), time.Now().Add(c.lasts))
		if c.lasts == sureFor { // it is there below, however late that is
			r.until = r.until.Add(time.Minute)
		}
	}
	for amount, after := range map[int64]time.Duration{1: 695 * time.Hour, 2: 700 * time.Hour, 11: budget.Never} {
		var refused *budget.ExceededError
		require.ErrorAs(t, s.refusal(amount, true), &refused)
		require.EqualValues(t, amount, refused.Refusals[0].Requested)
		for i, want := range []time.Duration{after, after / 2} {
			if got := refused.Refusals[i].RetryAfter; want != budget.Never {
				require.Less(t, got, want)
				require.Greater(t, got, want-time.Minute)
			} else {
				require.Equal(t, want, got)
			}
		}
	}
	for _, amount := range []int64{5, 6, 10, 12} {
		require.NoError(t, s.refusal(amount, false), "nobody has asked for %d, or it fits by now", amount)
	}
	require.NoError(t, s.refusal(4, true))
	for amount := range int64(100) {
		s.refuse(100+amount, refused(100+amount, month, time.Hour))
	}
	require.Len(t, *s.refused.Load(), maxRefusals)
}

// A slot gives back its slices at the first notice, then at most once in recallApart however many come, and does not forget one that came too soon.
func TestSlot_AFloodOfNoticesIsFollowedNowAndThen(t *testing.T) {
	t.Parallel()
	closed, end := context.WithCancel(t.Context())
	end()
	p, s := &Pool{live: closed, keeping: true, active: map[*slot]struct{}{}}, &slot{rule: &Rule{Idle: time.Hour}}
	start := time.Now()
	given := -1
	refill := func() {
		if s.current.Load() == nil {
			given++
			s.current.Store(&slice{ends: start.Add(time.Hour), endsWall: start.Add(time.Hour).UnixNano(), seenAt: start})
		}
	}
	refill()
	for now := start; now.Before(start.Add(time.Minute)); now = now.Add(10 * time.Millisecond) {
		s.notice(p, now)
		refill()
	}
	require.Equal(t, int(time.Minute/recallApart), given)
	require.True(t, s.recalled, "the last notices wait")
	s.age(p, start.Add(time.Minute))
	require.Nil(t, s.current.Load())
	require.False(t, s.recalled)
}

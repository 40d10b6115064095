package leases

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A slice is spent from until the first of the two clocks is past its end: the monotonic one, which stands still while a
// machine sleeps, and the wall clock, which can be set.
func TestSlice_EndsByEitherClock(t *testing.T) {
	now := time.Now()
	for name, test := range map[string]struct {
		ends time.Duration // by the monotonic clock
		wall time.Duration
		ok   bool
	}{
		"both are before": {time.Minute, time.Minute, true}, "the machine slept, or the clock was set ahead": {time.Minute, -time.Second, false},
		"the clock was set back": {-time.Second, time.Hour, false}, "both are past": {-time.Second, -time.Second, false},
	} {
		s := &slice{granted: 10, ends: now.Add(test.ends), endsWall: now.Add(test.wall).UnixNano()}
		_, ok := s.take(3)
		require.Equal(t, test.ok, ok, name)
		require.Equal(t, !test.ok, s.over(time.Now()), name)
	}
}

// Units that were taken and given back are there again. Once the slice is sealed, they count as used.
func TestSlice_SealedCountsTakenUnits(t *testing.T) {
	s := &slice{granted: 10, ends: time.Now().Add(time.Minute), endsWall: time.Now().Add(time.Minute).UnixNano()}
	for _, want := range []int64{0, 4} {
		offset, ok := s.take(4)
		require.True(t, ok)
		require.Equal(t, want, offset)
	}
	_, ok := s.take(4)
	require.False(t, ok)
	s.give(4)
	_, ok = s.take(6)
	require.True(t, ok)
	require.Equal(t, int64(10), s.seal())
	s.give(6)
	require.Equal(t, int64(10), s.seal())
	_, ok = s.take(1)
	require.False(t, ok)
}

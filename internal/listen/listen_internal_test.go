package listen

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// words is a listener of notices that are their payloads.
func words() *listener[string] {
	return &listener[string]{Channel: Channel[string]{Parse: func(p string) (string, bool) { return p, p != "?" }, Missed: "missed"}, wake: make(chan struct{}, 1)}
}

func (l *listener[N]) all() (all []N) {
	for {
		n, ok := l.take()
		if !ok {
			return all
		}
		all = append(all, n)
	}
}

func TestListener_TooManyNoticesMakeWayForOneThatSaysSo(t *testing.T) {
	t.Parallel()
	l := words()
	l.miss()
	l.hear("?")
	for range maxQueued - 1 {
		l.hear("h")
	}
	require.Len(t, l.queued, maxQueued, "two that were missed are one")
	first, err := l.next(t.Context())
	require.NoError(t, err)
	require.Equal(t, "missed", first)
	l.hear("h")
	require.Len(t, l.queued, maxQueued)
	l.hear("one too many")
	l.hear("after it")
	require.Equal(t, []string{"missed", "after it"}, l.all())
}

func TestListener_TooManyBytesMakeWayForANoticeThatSaysSo(t *testing.T) {
	t.Parallel()
	l := words()
	long := strings.Repeat("x", maxQueuedBytes/4)
	for range 3 {
		l.hear(long)
	}
	_, ok := l.take()
	require.True(t, ok)
	l.hear(long)
	l.hear(long)
	require.Len(t, l.queued, 4, "a taken notice does not count")
	l.hear("x")
	l.hear("after it")
	require.Equal(t, []string{"missed", "after it"}, l.all())
	require.Zero(t, l.bytes)
}

// Anybody may send notices: so many a second are handled, and the others wait.
func TestListener_ABurstOfNoticesIsSpread(t *testing.T) {
	t.Parallel()
	l := words()
	for range maxPerSecond + 1 {
		l.hear("h")
	}
	enough := errors.New("enough")
	began, handled := time.Now(), 0
	err := l.handle(t.Context(), func(context.Context, string) error {
		if handled++; handled > maxPerSecond {
			return enough
		}
		return nil
	})
	require.ErrorIs(t, err, enough)
	require.GreaterOrEqual(t, time.Since(began), 900*time.Millisecond)
}

package holds

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestListener_TooManyNoticesMakeWayForOneThatSaysSo(t *testing.T) {
	t.Parallel()
	l := &listener{wake: make(chan struct{}, 1)}
	l.add(Notice{Missed: true})
	l.add(Notice{Missed: true})
	for version := 1; version < maxQueued; version++ {
		l.add(Notice{ID: "h", Version: version})
	}
	require.Len(t, l.queued, maxQueued, "two that were missed are one")
	first, err := l.next(t.Context())
	require.NoError(t, err)
	require.Equal(t, Notice{Missed: true}, first)
	l.add(Notice{ID: "h", Version: maxQueued})
	require.Len(t, l.queued, maxQueued)
	l.add(Notice{ID: "h", Version: maxQueued + 1})
	l.add(Notice{ID: "h", Version: maxQueued + 2})
	require.Equal(t, []Notice{{Missed: true}, {ID: "h", Version: maxQueued + 2}}, l.queued)
}

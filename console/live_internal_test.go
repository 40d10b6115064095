package console

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// counted draws the number of the drawing.
func counted(n *atomic.Int64) func(context.Context) ([]byte, error) {
	return func(context.Context) ([]byte, error) { return fmt.Append(nil, n.Add(1)), nil }
}

func (l *live) state() (running bool, viewers, topics int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running, l.viewers, len(l.topics)
}

// A topic with any number of viewers is read once, and all get the same. A viewer that does not listen is not waited
// for.
func TestLive_OneReaderHoweverManyLook(t *testing.T) {
	t.Parallel()
	const viewers = 50
	l := newLive(time.Millisecond, viewers)
	var n atomic.Int64
	var messages []chan []byte
	var leaves []func()
	for range viewers {
		m, leave, ok := l.look("a", counted(&n))
		require.True(t, ok)
		messages, leaves = append(messages, m), append(leaves, leave)
	}
	_, _, ok := l.look("a", counted(&n))
	require.False(t, ok, "too many")

	last := ""
	for range 20 { // viewer 0 listens, and the others do not
		text := string(<-messages[0])
		require.NotEqual(t, last, text)
		last = text
	}
	leaves[0]()
	leaves[0]() // once more does nothing
	_, seen, _ := l.state()
	require.Equal(t, viewers-1, seen)
	for i := 1; i < viewers; i++ {
		require.LessOrEqual(t, len(messages[i]), 1, "only the newest one waits")
		leaves[i]()
	}
	pgtest.WaitFor(t, "the reader ends", func() bool { running, _, _ := l.state(); return !running })
	read := n.Load()
	_, seen, topics := l.state()
	require.Zero(t, seen)
	require.Zero(t, topics)

	// Reading begins again with the next viewer, and that viewer gets the news.
	m, leave, ok := l.look("a", counted(&n))
	require.True(t, ok)
	require.Equal(t, fmt.Sprint(read+1), string(<-m))
	leave()
	pgtest.WaitFor(t, "the reader ends", func() bool { running, _, _ := l.state(); return !running })
}

func TestLive_SendsNewsAndFailures(t *testing.T) {
	t.Parallel()
	l := newLive(time.Millisecond, 10)
	var drawn atomic.Int64
	var fails atomic.Bool
	m, leave, _ := l.look("a", func(context.Context) ([]byte, error) {
		drawn.Add(1)
		if fails.Load() {
			return nil, errors.New("no")
		}
		return []byte("the same"), nil
	})
	require.Equal(t, "the same", string(<-m))
	from := drawn.Load()
	pgtest.WaitFor(t, "it is read again", func() bool { return drawn.Load() > from+5 })
	require.Empty(t, m)
	fails.Store(true)
	require.Equal(t, string(stale), string(<-m))
	fails.Store(false)
	pgtest.WaitFor(t, "the section is good again", func() bool { return string(<-m) == "the same" })
	leave()
}

func TestLive_CloseEndsAllAndLetsNoneBegin(t *testing.T) {
	t.Parallel()
	l := newLive(time.Hour, 10)
	var n atomic.Int64
	a, leave, _ := l.look("a", counted(&n))
	b, _, _ := l.look("b", counted(&n))
	l.close()
	for _, m := range []chan []byte{a, b} {
		for range m { // until it is closed
		}
	}
	leave()
	_, _, ok := l.look("a", counted(&n))
	require.False(t, ok)
	pgtest.WaitFor(t, "the reader ends", func() bool { running, _, _ := l.state(); return !running })
}

// The reader does not wait for its next reading to see that nobody looks any more.
func TestLive_EndsWithTheLastViewer(t *testing.T) {
	t.Parallel()
	l := newLive(time.Hour, 10)
	var n atomic.Int64
	m, leave, _ := l.look("a", counted(&n))
	<-m
	leave()
	pgtest.WaitFor(t, "the reader ends", func() bool { running, _, _ := l.state(); return !running })

	signal(l.empty) // the reader before has not taken it

	// The second viewer sees the first one's content, and a viewer of another page does not wait an hour.
	first, leave, _ := l.look("a", counted(&n))
	defer leave()
	require.Equal(t, "2", string(<-first))
	second, leave, _ := l.look("a", counted(&n))
	defer leave()
	require.Equal(t, "2", string(<-second))
	var others atomic.Int64
	other, leave, _ := l.look("b", counted(&others))
	defer leave()
	require.Equal(t, "1", string(<-other))
	require.Equal(t, int64(2), n.Load(), "topic a is not read again for a viewer of topic b")
}

func TestEvent_KeepsLines(t *testing.T) {
	t.Parallel()
	require.Equal(t, "data: <p>\ndata: a\n\n", string(event([]byte("<p>\r\na\n"))))
}

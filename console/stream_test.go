package console_test

import (
	"bufio"
	"context"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/pgtest"
)

// viewer is a browser that listens to a stream.
type viewer struct {
	response *http.Response
	lines    *bufio.Scanner
	leave    context.CancelFunc
}

func (w *world) view(address string) *viewer {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	w.t.Cleanup(cancel)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	require.NoError(w.t, err)
	response, err := pgtest.HTTP.Do(request)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = response.Body.Close() })
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	return &viewer{response, lines, cancel}
}

// hears reads until a line has the text, and says whether one did before the stream ended.
func (v *viewer) hears(text string) bool {
	for v.lines.Scan() {
		if strings.Contains(v.lines.Text(), text) {
			return true
		}
	}
	return false
}

// going are the goroutines of the package that serve streams or read for them, of all tests of this process.
func going(function string) int {
	stacks := make([]byte, 4<<20)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "console.(*"+function+"(")
}

// Many viewers look at once. Some leave without a word, and one never reads. The others get the news, and in the end
// nothing is left running.
func TestStream_SendsNewsAndLeavesNothingBehind(t *testing.T) {
	w := newWorld(t, console.Config{Refresh: 100 * time.Millisecond, MaxViewers: 12}, "")
	w.charge("org/acme", 1)
	address := w.see("scope", "scope", "org/acme", "limits", "a=1000/1h")
	stream, ok := attr(all(address, "main")[0], "data-stream")
	require.True(t, ok)
	var viewers []*viewer
	for range 12 {
		viewers = append(viewers, w.view(w.url("")+stream))
	}
	require.Equal(t, "text/event-stream", viewers[0].response.Header.Get("Content-Type"))
	require.Equal(t, "no-store", viewers[0].response.Header.Get("Cache-Control"))
	refused, _ := w.get(w.url("live"))
	require.Equal(t, http.StatusServiceUnavailable, refused.StatusCode, "too many")
	require.Equal(t, 12, going("Handler).stream"))
	require.Equal(t, 1, going("live).run"))

	for _, v := range viewers[:6] {
		v.leave() // without a word
	}
	w.charge("org/acme", 776)
	for _, v := range viewers[6:11] { // the last one never reads
		require.True(t, v.hears("777"))
	}
	pgtest.WaitFor(t, "the streams of those who went end", func() bool { return going("Handler).stream") == 6 })

	for _, v := range viewers[6:] {
		v.leave()
	}
	// Nobody looks, so no goroutine is left that reads.
	pgtest.WaitFor(t, "all streams end", func() bool { return going("Handler).stream")+going("live).run") == 0 })

	// Close ends streams, so that a server can shut down.
	last := w.view(w.url("live", "page", ""))
	require.True(t, last.hears("Entries a second"))
	w.page.Close()
	require.False(t, last.hears("no such thing"))
	require.NoError(t, last.lines.Err())
	refused, _ = w.get(w.url("live"))
	require.Equal(t, http.StatusServiceUnavailable, refused.StatusCode)
	w.see("")
}

// The page says that the database does not answer, and that it does again.
func TestStream_ReportsFailedReads(t *testing.T) {
	w := newWorld(t, console.Config{Refresh: 100 * time.Millisecond, Timeout: 2 * time.Second}, "")
	v := w.view(w.url("live", "page", ""))
	require.True(t, v.hears("data: <section"))
	lock, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), "lock table metered.operations in access exclusive mode")
	require.NoError(t, err)
	require.True(t, v.hears("event: stale"))
	response, body := w.get(w.url(""))
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	require.Equal(t, "5", response.Header.Get("Retry-After"))
	require.Contains(t, text(parse(t, body)), "did not answer in time")
	require.NoError(t, lock.Rollback(t.Context()))
	require.True(t, v.hears("data: <section"))
	v.leave()
	pgtest.WaitFor(t, "pages are served again", func() bool {
		response, _ := w.get(w.url(""))
		return response.StatusCode == http.StatusOK
	})
}

// A panic of the program's own Limits ends no process: nothing above the reader would catch it.
func TestStream_OutlivesAPanic(t *testing.T) {
	w := newWorld(t, console.Config{Refresh: 100 * time.Millisecond, Limits: func(scope string) []budget.Limit {
		if scope == "s" {
			panic("no limits today")
		}
		return nil
	}}, "")
	w.charge("s", 1)
	w.charge("t", 1)
	require.True(t, w.view(w.url("live", "page", "scope", "scope", "s")).hears("event: stale"))
	require.True(t, w.view(w.url("live", "page", "scope", "scope", "t")).hears("data: <section"))
}

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// message is a map as it comes over the stream.
type message struct {
	hallMap
	Mine []ownHold `json:"mine"`
}

// watch opens a stream, which is closed with the test, and reads it. The channel is closed when the stream ends.
func (b *browser) watch() <-chan message {
	b.h.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	b.h.t.Cleanup(stop)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, b.h.bases[b.process]+"/api/events/"+b.h.event+"/stream", nil)
	require.NoError(b.h.t, err)
	request.Header.Set("Cookie", b.cookie)
	response, err := pgtest.HTTP.Do(request)
	require.NoError(b.h.t, err)
	require.Equal(b.h.t, http.StatusOK, response.StatusCode)
	require.Equal(b.h.t, "text/event-stream", response.Header.Get("Content-Type"))
	messages := make(chan message, 10_000)
	go func() {
		defer close(messages)
		defer response.Body.Close()
		lines := bufio.NewScanner(response.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			data, ok := strings.CutPrefix(lines.Text(), "data: ")
			if !ok {
				continue
			}
			var m message
			if json.Unmarshal([]byte(data), &m) != nil {
				m.Status = status("broken: " + data)
			}
			messages <- m
		}
	}()
	return messages
}

// until reads messages up to a wanted one. All have to add up.
func (h *hall) until(messages <-chan message, what string, wanted func(message) bool) message {
	h.t.Helper()
	end := time.After(time.Until(pgtest.Patience(h.t)))
	for {
		select {
		case m, ok := <-messages:
			require.True(h.t, ok, "the stream has ended, waiting for %s", what)
			h.addsUp(m)
			if wanted(m) {
				return m
			}
		case <-end:
			require.Fail(h.t, "not seen: "+what)
		}
	}
}

func (h *hall) addsUp(m message) {
	h.t.Helper()
	c := m.Counts
	require.Equal(h.t, 500, c.Available+c.Held+c.Sold+c.Blocked, m.Status)
	require.Equal(h.t, 500, c.Seats)
	require.Equal(h.t, c, counts{
		strings.Count(m.Seats, "a"), strings.Count(m.Seats, "h"), strings.Count(m.Seats, "s"), strings.Count(m.Seats, "b"), len(m.Seats),
	})
}

func TestStream_BrowsersAtAllProcessesSeeChangesAndOnlyTheirOwnHolds(t *testing.T) {
	t.Parallel()
	h := open(t, 2, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	people := h.people(h.org, 2)
	ben, cleo := people[0], people[1] // at different processes
	a, b := ben.watch(), cleo.watch()
	h.until(b, "the whole hall", func(m message) bool { return m.Counts.Available == 500 && len(m.Blocks) == 5 })
	hold := ben.holding(h.seats[3])
	m := h.until(a, "one's own hold", func(m message) bool { return m.Counts.Held == 1 })
	require.Equal(t, []ownHold{{Hold: hold, Seat: 3, State: "held", HeldUntil: noon.Add(5 * time.Minute), LeftMS: m.Mine[0].LeftMS}}, m.Mine)
	require.Greater(t, m.Mine[0].LeftMS, int64(200_000))
	require.Equal(t, []float64{99.8, 0.2}, []float64{m.PercentAvailable, m.PercentHeld})
	require.Equal(t, noon.Unix(), m.At.Unix())
	m = h.until(b, "another's hold", func(m message) bool { return m.Counts.Held == 1 })
	require.Equal(t, byte('h'), m.Seats[3])
	require.Empty(t, m.Mine)

	h.people(h.org, 1)[0].at(1).holding(h.seats[4])
	h.until(a, "a second one", func(m message) bool { return m.Counts.Held == 2 && len(m.Mine) == 1 })
	require.Equal(t, http.StatusOK, ben.checkout("", hold).Status)
	m = h.until(b, "sold", func(m message) bool { return m.Counts.Sold == 1 })
	require.Equal(t, int64(2), m.Blocks[0].Taken)
	require.Equal(t, http.StatusOK, h.admin.ask(http.MethodPost, h.admin.seatPath(h.seats[9], "block"), "", nil).Status)
	h.until(b, "blocked", func(m message) bool { return m.Counts.Blocked == 1 })
	h.admin.ask(http.MethodPut, "/api/events/"+h.event+"/blocks/"+h.blocks[2], "", map[string]any{"capacity": 7})
	h.until(b, "the capacity", func(m message) bool { return m.Blocks[2].Capacity == 7 })
	// An expired seat is free at that time, swept or not: no job and no sweeper runs here.
	clock.Advance(5 * time.Minute)
	h.until(a, "run out", func(m message) bool { return m.Counts == counts{498, 0, 1, 1, 500} })
	h.until(b, "run out", func(m message) bool { return m.Counts == counts{498, 0, 1, 1, 500} })
	h.setSale(map[string]any{"status": "closed"})
	h.until(a, "closed", func(m message) bool { return m.Status == "closed" })
}

// The map is read as good as never by itself here.
func TestStream_ConvergesWhenTheListenersConnectionIsLost(t *testing.T) {
	t.Parallel()
	cfg := quiet
	cfg.refresh = time.Hour
	h := open(t, 1, cfg)
	ben := h.people(h.org, 1)[0]
	messages := ben.watch()
	h.until(messages, "the beginning", func(m message) bool { return m.Counts.Available == 500 })
	const listeners = ` from pg_stat_activity where datname = current_database() and query like 'listen %'`
	pgtest.WaitFor(t, "the process to listen", func() bool { return one[int](h, `select count(*)::int`+listeners) == 1 })
	for i := range 5 {
		require.True(t, one[bool](h, `select pg_terminate_backend(pid)`+listeners))
		ben.holding(h.seats[i]) // nobody may hear of it
		h.until(messages, "a hold that was not heard of", func(m message) bool { return m.Counts.Held == i+1 })
		pgtest.WaitFor(t, "the process to listen again", func() bool { return one[int](h, `select count(*)::int`+listeners) == 1 })
	}
}

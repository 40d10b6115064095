package main

import (
	"net/http"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// insist repeats a request with its key, at one process and then another, until its outcome is known.
func (b *browser) insist(t *testing.T, seat, key string) (last answer) {
	for n, end := 0, pgtest.Patience(t); time.Now().Before(end); n++ {
		a := b.at(n%len(b.h.bases)).do(http.MethodPost, b.seatPath(seat, "hold"), key, nil)
		if a.Err == nil && a.Status != http.StatusServiceUnavailable {
			return a
		}
		if a.Err == nil && a.Header.Get("Idempotency-Key") != key {
			t.Errorf("a 503 without its key: %s", a.Body)
		}
		last = a
		time.Sleep(50 * time.Millisecond) // as Retry-After says, but for the patience of a test
	}
	t.Errorf("no answer: %s", last.Body)
	return last
}

// Two processes serve one database. One of them is killed, and then the server is restarted, in the middle of a rush.
func TestSeats_AProcessIsKilledAndTheServerRestartedAndEachSeatIsHeldOnce(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	server, pool := pgtest.Start(t, pgserver.Options{Private: true, Durable: true, TCP: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	var bases [2]string
	var processes [2]*exec.Cmd
	for i := range 2 {
		bases[i], processes[i] = exampletest.Start(t, pgtest.ConnString(pool), "open ", "-listen", "127.0.0.1:0", "-pay", "10ms")
	}
	h := openOn(t, pool, 0, quiet, bases[:]...)
	people := h.people(h.org, 10)
	messages := people[0].at(1).watch()
	h.until(messages, "the whole hall", func(m message) bool { return m.Counts.Available == 500 })
	require.Equal(t, http.StatusCreated, people[0].at(0).hold(h.seats[499]).Status)
	h.until(messages, "a hold of the other process", func(m message) bool { return m.Counts.Held == 1 && len(m.Mine) == 1 })

	var done atomic.Int64
	finished := make(chan []int)
	go func() {
		finished <- exampledb.AtOnce(len(people), func(i int) (held int) {
			for n := range 9 {
				a := people[i].insist(t, h.seats[i*10+n], metered.NewID())
				if a.Status == http.StatusCreated || a.Status == http.StatusOK {
					held++
				}
				done.Add(1)
			}
			return held
		})
	}()
	pgtest.WaitFor(t, "20 seats to be asked for", func() bool { return done.Load() >= 20 })
	require.NoError(t, processes[0].Process.Kill())
	_ = processes[0].Wait()
	pgtest.WaitFor(t, "40 seats to be asked for", func() bool { return done.Load() >= 40 })
	require.NoError(t, server.Restart(t.Context()))
	require.Equal(t, []int{9, 9, 9, 9, 9, 9, 9, 9, 9, 9}, <-finished)
	for _, b := range people[1:] {
		require.Equal(t, int64(9), h.charged(b.user))
	}
	require.Equal(t, 91, one[int](h, `select count(*)::int from metered.holds`))
	require.Equal(t, 91, one[int](h, `select count(*)::int from river_job`))
	h.verify()
	// The stream may have ended, and says how it is when it is opened again.
	h.until(people[0].at(1).watch(), "all holds", func(m message) bool { return m.Counts.Held == 91 && len(m.Mine) == 10 })

	require.NoError(t, processes[1].Process.Signal(os.Interrupt))
	require.NoError(t, processes[1].Wait(), "it ends, streams or not")
}

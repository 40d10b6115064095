package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// insist repeats a request with its key, at one process and then another, until its outcome is known.
func (b *browser) insist(t *testing.T, seat, key string) (last answer) {
	for n := range 600 {
		a, err := b.at(n%len(b.h.bases)).do(http.MethodPost, b.seatPath(seat, "hold"), key, nil)
		if err == nil && a.status != http.StatusServiceUnavailable {
			return a
		}
		if err == nil && a.header.Get("Idempotency-Key") != key {
			t.Errorf("a 503 without its key: %s", a.text)
		}
		last = a
		time.Sleep(50 * time.Millisecond) // as Retry-After says, but for the patience of a test
	}
	t.Errorf("no answer: %s", last.text)
	return last
}

// program builds the program, once.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "seats-test-")
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "seats")
	return binary, exec.Command("go", "build", "-o", binary, ".").Run()
})

// startProcess runs the program as a user would, on the pool's database.
func startProcess(t *testing.T, pool *pgxpool.Pool, args ...string) (base string, process *exec.Cmd) {
	t.Helper()
	binary, err := program()
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(binary)) })
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute) // the machine may be busy
	t.Cleanup(cancel)
	process = exec.CommandContext(ctx, binary, append([]string{"-listen", "127.0.0.1:0"}, args...)...)
	process.Dir = t.TempDir() // not that of the repository
	process.Env = append(os.Environ(), "DATABASE_URL="+pgtest.ConnString(pool))
	stdout, err := process.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, process.Start())
	lines := bufio.NewScanner(stdout)
	for base == "" && lines.Scan() {
		_, base, _ = strings.Cut(lines.Text(), "open ")
	}
	require.NotEmpty(t, base)
	go func() { _, _ = io.Copy(io.Discard, stdout) }()
	return base, process
}

// Two processes serve one database. One of them is killed, and then the server is restarted, in the middle of a rush.
func TestSeats_AProcessIsKilledAndTheServerRestartedAndEachSeatIsHeldOnce(t *testing.T) {
	t.Parallel()
	server, pool := pgtest.Start(t, pgserver.Options{Private: true, Durable: true, TCP: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	var bases [2]string
	var processes [2]*exec.Cmd
	var starting sync.WaitGroup
	for i := range 2 { // both find that the tables are missing
		starting.Go(func() { bases[i], processes[i] = startProcess(t, pool, "-pay", "10ms") })
	}
	starting.Wait()
	if t.Failed() {
		t.FailNow()
	}
	h := openOn(t, pool, 0, quiet, bases[:]...)
	people := h.people(h.org, 10)
	messages := people[0].at(1).watch()
	h.until(messages, "the whole hall", func(m message) bool { return m.Counts.Available == 500 })
	require.Equal(t, http.StatusCreated, people[0].at(0).hold(h.seats[499]).status)
	h.until(messages, "a hold of the other process", func(m message) bool { return m.Counts.Held == 1 && len(m.Mine) == 1 })

	var done atomic.Int64
	finished := make(chan []int)
	go func() {
		finished <- together(people, func(i int, b *browser) (held int) {
			for n := range 9 {
				a := b.insist(t, h.seats[i*10+n], metered.NewID())
				if a.status == http.StatusCreated || a.status == http.StatusOK {
					held++
				}
				done.Add(1)
			}
			return held
		})
	}()
	require.Eventually(t, func() bool { return done.Load() >= 20 }, time.Minute, time.Millisecond)
	require.NoError(t, processes[0].Process.Kill())
	_ = processes[0].Wait()
	require.Eventually(t, func() bool { return done.Load() >= 40 }, time.Minute, time.Millisecond)
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

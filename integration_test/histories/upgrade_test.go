package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The phases of an upgrade.
const (
	before int32 = 1 + iota // all calls are made by programs of the release before
	beside                  // half of them
	past                    // none
)

// older is a program of the release before. When it is killed, another one takes its place.
type older struct {
	*world
	path string

	mu      sync.Mutex
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	errs    bytes.Buffer
	calls   map[int64]func(reply) // under way
	n       int64
	killed  bool
	stopped bool
	ended   chan struct{}
}

// buildOlder builds this program with the release before.
func buildOlder(t testing.TB) (path string) {
	// Not ./histories: files of that name are there.
	return pgtest.BuildProgram(t, pgtest.Released(t, "../.."), "./older", "main.go", "calls.go", "model.go", "testdata/names.go")
}

// The upgrade itself is a setting of histories that make long and CI run.
func TestOlder_IsBuiltWithTheReleaseBefore(t *testing.T) {
	t.Parallel()
	buildOlder(t)
}

// startOlder makes the schema of the release before, and starts two of its programs.
func (w *world) startOlder() {
	path := buildOlder(w.T)
	out, err := exec.CommandContext(w.Context(), path, "migrate", w.server.ConnString()).CombinedOutput()
	require.NoError(w.T, err, "%s", out)
	w.phase.Store(before)
	for range 2 {
		p := &older{world: w, path: path, ended: make(chan struct{})}
		w.older = append(w.older, p)
		require.NoError(w.T, p.start())
		w.Cleanup(func() { p.kill(true) })
	}
}

// program is what makes a client's calls: this program, or one of the release before.
func (w *world) program(n int) func(call) reply {
	if phase := w.phase.Load(); phase == before || phase == beside && n%2 == 0 {
		return w.older[n/2%len(w.older)].perform
	}
	return w.perform
}

func (p *older) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd, p.calls, p.killed = exec.Command(p.path, "serve", p.server.ConnString()), map[int64]func(reply){}, false
	p.errs.Reset()
	p.cmd.Stderr = &p.errs
	var err error
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	go p.read(out)
	return p.cmd.Start()
}

// read takes the replies of a program until it ends. Calls that it did not answer have an unknown outcome.
func (p *older) read(out io.Reader) {
	for in := json.NewDecoder(out); ; {
		var r numbered
		if in.Decode(&r) != nil {
			break
		}
		p.mu.Lock()
		answer := p.calls[r.N]
		delete(p.calls, r.N)
		p.mu.Unlock()
		answer(*r.Reply)
	}
	err := p.cmd.Wait()
	p.mu.Lock()
	for _, answer := range p.calls {
		answer(reply{Outcome: unknown})
	}
	killed, stopped := p.killed, p.stopped
	p.mu.Unlock()
	switch {
	case stopped:
		close(p.ended)
	case killed:
		assert.NoError(p.T, p.start())
	default:
		p.Errorf("a program of the release before ended: %v: %s", err, p.errs.String())
	}
}

func (p *older) perform(c call) reply {
	got := make(chan reply, 1)
	p.mu.Lock()
	p.n++
	if p.stopped || json.NewEncoder(p.stdin).Encode(numbered{N: p.n, Call: &c}) != nil {
		got <- reply{Outcome: unknown} // also where it was killed in the middle
	} else {
		p.calls[p.n] = func(r reply) { got <- r }
	}
	p.mu.Unlock()
	r := <-got
	if r.Outcome == unknown {
		r.Answer.State = c.Who
	}
	return r
}

// kill ends the program, for good at the end of the test.
func (p *older) kill(stopped bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killed, p.stopped = true, p.stopped || stopped
	_ = p.cmd.Process.Kill()
}

// stop lets the program end its calls.
func (p *older) stop() {
	p.mu.Lock()
	p.stopped = true
	_ = p.stdin.Close()
	p.mu.Unlock()
	<-p.ended
}

// upgrade upgrades the schema under the programs of the release before, which end later.
func (w *world) upgrade() {
	w.after(w.calls / 3)
	w.untilDone("the upgrade", func(ctx context.Context) error {
		_, err := metered.Migrate(ctx, w.pool, metered.MigrateOptions{})
		return err
	})
	w.untilDone("the clock's steps", func(ctx context.Context) error {
		_, err := w.pool.Exec(ctx, steppedSQL, pgx.QueryExecModeSimpleProtocol)
		return err
	})
	w.faults["upgraded"].Add(1)
	w.phase.Store(beside)
	w.after(w.calls / 3)
	w.phase.Store(past)
	for _, p := range w.older {
		p.stop()
	}
	w.untilDone("an upgrade that drops functions of the release before", func(ctx context.Context) error {
		r, err := metered.Migrate(ctx, w.pool, metered.MigrateOptions{DropPrevious: true})
		if err == nil {
			assert.NotEmpty(w.T, r.Dropped)
		}
		return err
	})
}

// untilDone runs fn until it succeeds, whatever meets it. It may fail for as long as there are faults, and once more: however
// long a server is down on a slow machine, what is broken fails also after it.
func (w *world) untilDone(what string, fn func(ctx context.Context) error) {
	for try := 1; ; try++ {
		undisturbed := w.quiet.Load()
		pgtest.WaitFor(w.T, "the server to answer", func() bool { return w.pool.Ping(w.Context()) == nil })
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		err := fn(ctx)
		cancel()
		if err == nil {
			w.Logf("%s: done at attempt %d", what, try)
			return
		}
		if undisturbed {
			w.Errorf("%s: %v", what, err)
			return
		}
	}
}

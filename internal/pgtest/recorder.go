package pgtest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgmetered/metered/observe"
)

// Recorder is an observer that keeps all work and events.
type Recorder struct {
	mu     sync.Mutex
	begun  int
	ended  []Ended
	events []observe.Event
}

// Ended is work that has ended, with the work that it was part of.
type Ended struct {
	observe.Op
	observe.End
	Within observe.Work
}

type within struct{}

// Start finds the surrounding work in the context.
func (r *Recorder) Start(ctx context.Context, op observe.Op) (context.Context, func(observe.End)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun++
	outer, _ := ctx.Value(within{}).(observe.Work)
	var once sync.Once
	return context.WithValue(ctx, within{}, op.Work), func(e observe.End) {
		again := true
		once.Do(func() { again = false })
		if again {
			panic("the end was reported twice")
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ended = append(r.ended, Ended{op, e, outer})
	}
}

func (r *Recorder) Event(_ context.Context, e observe.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// Forget empties it.
func (r *Recorder) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun, r.ended, r.events = 0, nil, nil
}

// Told are the events as "kind name n", with "pending", in their order, without those of the kinds
// left out.
func (r *Recorder) Told(without ...observe.Kind) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	told := []string{}
	for _, e := range r.events {
		if slices.Contains(without, e.Kind) {
			continue
		}
		text := fmt.Sprintf("%s %s %d", e.Kind, e.Name, e.N)
		if e.Pending {
			text += " pending"
		}
		told = append(told, text)
	}
	return told
}

// Sum adds up N of a kind's events, of all names or of these.
func (r *Recorder) Sum(kind observe.Kind, names ...string) (n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Kind == kind && (len(names) == 0 || slices.Contains(names, e.Name)) {
			n += e.N
		}
	}
	return n
}

// Lag is that of the last sweep.
func (r *Recorder) Lag() (lag time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Kind == observe.SweepLag {
			lag = e.Lag
		}
	}
	return lag
}

// Ended is the work of a kind that has ended, in the order of the ends. All that began must have
// ended.
func (r *Recorder) Ended(t testing.TB, work observe.Work) (all []Ended) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.begun != len(r.ended) {
		t.Errorf("of %d beginnings %d have an end", r.begun, len(r.ended))
	}
	for _, e := range r.ended {
		if e.Work == work {
			all = append(all, e)
		}
	}
	return all
}

// Names are those of the work of a kind that has ended.
func (r *Recorder) Names(t testing.TB, work observe.Work) (names []string) {
	t.Helper()
	for _, e := range r.Ended(t, work) {
		names = append(names, e.Name)
	}
	return names
}

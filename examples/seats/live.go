package main

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// pace is the shortest time between two readings of a map.
const pace = 100 * time.Millisecond

// live reads the maps that somebody is looking at, each once for all its viewers of this process. A message to a
// browser is a whole map: a slow browser gets the newest, and misses nothing by that.
type live struct {
	refresh time.Duration
	read    func(ctx context.Context, org, event string) (*hallMap, error)

	mu      sync.Mutex
	closed  bool
	watches map[string]*watch // by event
}

// watch is an event that somebody is looking at.
type watch struct {
	live    *live
	org     string
	viewers int
	stop    context.CancelFunc
	touched chan struct{} // has an element if there is news

	latest *hallMap
	next   chan struct{} // is closed when latest changes: to nil if there is no telling any more
}

func newLive(refresh time.Duration, read func(ctx context.Context, org, event string) (*hallMap, error)) *live {
	return &live{refresh: refresh, read: read, watches: map[string]*watch{}}
}

// look watches an event, until leave is called.
func (l *live) look(org, event string) (w *watch, leave func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w = l.watches[event]
	if w == nil {
		ctx, stop := context.WithCancel(context.Background())
		w = &watch{live: l, org: org, stop: stop, touched: make(chan struct{}, 1), next: make(chan struct{})}
		if l.closed {
			w.show(nil)
		} else {
			l.watches[event] = w
			go w.keep(ctx, event)
		}
	}
	w.viewers++
	return w, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if w.viewers--; w.viewers == 0 {
			w.stop()
			if l.watches[event] == w {
				delete(l.watches, event)
			}
		}
	}
}

// now is the newest map, or nil if there is none so far, and a channel that is closed when it changes.
func (w *watch) now() (*hallMap, <-chan struct{}) {
	w.live.mu.Lock()
	defer w.live.mu.Unlock()
	return w.latest, w.next
}

// show gives a map to all viewers, and waits for none. The caller has the lock.
func (w *watch) show(m *hallMap) {
	w.latest = m
	close(w.next)
	if m != nil {
		w.next = make(chan struct{})
	}
}

// touch says that something may have changed, of one organisation or ("") of any.
func (l *live) touch(org string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.watches {
		if org == "" || w.org == org {
			select {
			case w.touched <- struct{}{}:
			default:
			}
		}
	}
}

// close ends all streams, and lets none begin.
func (l *live) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for event := range l.watches {
		l.drop(event)
	}
}

func (l *live) drop(event string) {
	w := l.watches[event]
	delete(l.watches, event)
	w.stop()
	w.show(nil)
}

// keep reads an event's map: on news of it, when a hold expires, and once in a while in any case, since news can get
// lost. If it cannot be read the streams end, and the browsers look for a process that can.
func (w *watch) keep(ctx context.Context, event string) {
	for failures := 0; ; {
		reading, cancel := context.WithTimeout(ctx, 5*time.Second)
		m, err := w.live.read(reading, w.org, event)
		cancel()
		w.live.mu.Lock()
		switch {
		case ctx.Err() != nil:
		case err == nil:
			failures = 0
			w.show(m)
		default:
			if failures++; failures == 3 {
				slog.Warn("the map cannot be read", "event", event, "error", err)
				w.live.drop(event)
			}
		}
		w.live.mu.Unlock()
		wait := w.live.refresh
		if err == nil {
			wait = min(wait, max(m.nextEnd, 0)+time.Millisecond)
		}
		paced := time.After(pace) // many changes are one message
		select {
		case <-ctx.Done():
			return
		case <-w.touched:
			<-paced
		case <-time.After(wait):
		}
	}
}

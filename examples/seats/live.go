package main

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"
)

// pace is the shortest time between two readings of a map.
const pace = 100 * time.Millisecond

// live keeps the maps that somebody is looking at up to date. Each message to a browser is a whole map, so a missed
// one does not matter once the next one comes. A slow browser gets the newest and not the ones in between.
type live struct {
	refresh time.Duration
	read    func(ctx context.Context, org, event string) (*hallMap, error)

	mu      sync.Mutex
	closed  bool
	watches map[string]*watch // by event
}

// watch is an event that somebody is looking at.
type watch struct {
	org     string
	touched chan struct{} // has an element if there is news
	stop    context.CancelFunc
	viewers map[chan *hallMap]bool
	latest  *hallMap
}

func newLive(refresh time.Duration, read func(ctx context.Context, org, event string) (*hallMap, error)) *live {
	return &live{refresh: refresh, read: read, watches: map[string]*watch{}}
}

// look returns a channel with the event's maps, the newest one only, until leave is called. It is closed when there is
// no telling any more: the browser is to come again.
func (l *live) look(org, event string) (maps chan *hallMap, leave func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps = make(chan *hallMap, 1)
	if l.closed {
		close(maps)
		return maps, func() {}
	}
	w := l.watches[event]
	if w == nil {
		ctx, stop := context.WithCancel(context.Background())
		w = &watch{org: org, touched: make(chan struct{}, 1), stop: stop, viewers: map[chan *hallMap]bool{}}
		l.watches[event] = w
		go l.keep(ctx, event, w)
	}
	w.viewers[maps] = true
	if w.latest != nil {
		maps <- w.latest
	}
	return maps, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(w.viewers, maps)
		if len(w.viewers) == 0 && l.watches[event] == w {
			delete(l.watches, event)
			w.stop()
		}
	}
}

// touch says that something of an organisation's may have changed.
func (l *live) touch(org string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.watches {
		if w.org == org {
			w.touch()
		}
	}
}

func (l *live) touchAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.watches {
		w.touch()
	}
}

func (w *watch) touch() {
	select {
	case w.touched <- struct{}{}:
	default:
	}
}

// close ends all streams, and lets none begin.
func (l *live) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for event, w := range l.watches {
		l.drop(event, w)
	}
}

// drop ends the streams of an event. The caller has the lock.
func (l *live) drop(event string, w *watch) {
	w.stop()
	delete(l.watches, event)
	for maps := range w.viewers {
		close(maps)
	}
	clear(w.viewers)
}

// keep reads an event's map: on news of it, when a hold expires, and once in a while in any case, since news can get
// lost. If it cannot be read the streams end, and the browsers look for a process that can.
func (l *live) keep(ctx context.Context, event string, w *watch) {
	for failures := 0; ; {
		reading, cancel := context.WithTimeout(ctx, 5*time.Second)
		m, err := l.read(reading, w.org, event)
		cancel()
		if ctx.Err() != nil {
			return
		}
		wait := l.refresh
		if err == nil {
			failures = 0
			wait = min(wait, max(m.nextEnd, 0)+time.Millisecond)
			l.show(w, m)
		} else if failures++; failures == 3 {
			slog.Warn("the map cannot be read", "event", event, "error", err)
			l.mu.Lock()
			l.drop(event, w)
			l.mu.Unlock()
			return
		}
		paced := time.NewTimer(pace) // many changes are one message
		next := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-w.touched:
			select {
			case <-ctx.Done():
			case <-paced.C:
			}
		case <-next.C:
		}
		paced.Stop()
		next.Stop()
	}
}

// show gives a map to all viewers. It waits for none.
func (l *live) show(w *watch, m *hallMap) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.latest != nil && reflect.DeepEqual(w.latest.shown(), m.shown()) {
		return
	}
	w.latest = m
	for maps := range w.viewers {
		select {
		case <-maps: // not taken yet, and out of date
		default:
		}
		maps <- m
	}
}

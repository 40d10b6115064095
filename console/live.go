package console

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"time"
)

const (
	heartbeat    = 15 * time.Second
	writeTimeout = 10 * time.Second
	// maxStream ends a stream: the browser comes again, and the embedder's authentication sees it
	// again.
	maxStream = 10 * time.Minute
	// share is the largest part of the time that is spent reading, one in so many. A slow database
	// is read less often.
	share = 80
	// longest is how long the next reading is waited for at most: then it is seen that the database
	// answers again.
	longest = 10 * time.Second
)

// live keeps open pages up to date. One goroutine reads for any number of viewers, and only while
// there are some. Each message is the whole content, so a missed one does not matter once the next
// one comes. A slow browser gets the newest and not those in between.
type live struct {
	refresh    time.Duration
	longest    time.Duration // shorter in tests
	maxViewers int

	mu      sync.Mutex
	closed  bool
	running bool
	viewers int
	topics  map[string]*topic
	wake    chan struct{} // has an element if there is a new topic
	empty   chan struct{} // has an element if there is nobody left
}

// topic is the page of some viewers.
type topic struct {
	draw    func(context.Context) ([]byte, error)
	latest  []byte // nil until it was read, and if it could not be read
	viewers map[chan []byte]bool
}

// stale is the message that the page could not be read again.
var stale = []byte("event: stale\ndata:\n\n")

func newLive(refresh time.Duration, maxViewers int) *live {
	return &live{
		refresh: refresh, longest: longest, maxViewers: maxViewers,
		topics: map[string]*topic{}, wake: make(chan struct{}, 1), empty: make(chan struct{}, 1),
	}
}

// look returns a channel with the messages of a topic, the newest one only, until leave is called.
// The channel is closed when all streams end. ok is false if there are too many viewers.
func (l *live) look(name string, draw func(context.Context) ([]byte, error)) (messages chan []byte, leave func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.viewers >= l.maxViewers {
		return nil, nil, false
	}
	t := l.topics[name]
	if t == nil {
		t = &topic{draw: draw, viewers: map[chan []byte]bool{}}
		l.topics[name] = t
		signal(l.wake)
	}
	l.viewers++
	messages = make(chan []byte, 1)
	t.viewers[messages] = true
	if t.latest != nil {
		messages <- t.latest
	}
	if !l.running {
		l.running = true
		go l.run()
	}
	return messages, func() { l.leave(name, t, messages) }, true
}

func (l *live) leave(name string, t *topic, messages chan []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !t.viewers[messages] {
		return // all streams were ended
	}
	delete(t.viewers, messages)
	l.viewers--
	if len(t.viewers) == 0 {
		delete(l.topics, name)
	}
	if l.viewers == 0 {
		signal(l.empty)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// close ends all streams, and lets none begin.
func (l *live) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for name, t := range l.topics {
		for messages := range t.viewers {
			close(messages)
		}
		clear(t.viewers)
		delete(l.topics, name)
	}
	l.viewers = 0
	signal(l.empty)
}

// run reads every topic once in a while, until nobody looks.
func (l *live) run() {
	for due := time.Now(); ; {
		began := time.Now()
		all := !began.Before(due)
		for _, t := range l.seen(all) {
			message, err := t.draw(context.Background())
			if err != nil {
				message = stale
			}
			l.tell(t, message, err == nil)
		}
		if all {
			due = time.Now().Add(max(l.refresh, min(share*time.Since(began), l.longest)))
		}
		next := time.NewTimer(time.Until(due))
		select {
		case <-next.C:
		case <-l.wake:
		case <-l.empty:
		}
		next.Stop()
		if l.ended() {
			return
		}
	}
}

// seen are the topics that somebody looks at: all, or those that have nothing to show yet.
func (l *live) seen(all bool) []*topic {
	l.mu.Lock()
	defer l.mu.Unlock()
	topics := make([]*topic, 0, len(l.topics))
	for _, t := range l.topics {
		if all || t.latest == nil {
			topics = append(topics, t)
		}
	}
	return topics
}

func (l *live) ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running = l.viewers > 0
	return !l.running
}

// tell gives a message to all viewers. It waits for none.
func (l *live) tell(t *topic, message []byte, fresh bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if fresh && bytes.Equal(t.latest, message) {
		return
	}
	t.latest = nil
	if fresh {
		t.latest = message
	}
	for messages := range t.viewers {
		select {
		case <-messages: // not taken yet, and out of date
		default:
		}
		messages <- message
	}
}

// event is a message with the HTML of a fragment.
func event(html []byte) []byte {
	var b bytes.Buffer
	for line := range bytes.Lines(html) {
		b.WriteString("data: ")
		b.Write(bytes.TrimRight(line, "\r\n"))
		b.WriteByte('\n')
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// stream sends the messages of a topic to a browser, as server-sent events.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request, name string,
	draw func(context.Context) ([]byte, error)) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // for a proxy in between
	if r.Method == http.MethodHead {
		return
	}
	messages, leave, ok := h.live.look(name, draw)
	if !ok {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Retry-After", "60")
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	defer leave()
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // a stream outlives Server.ReadTimeout
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	end := time.NewTimer(maxStream)
	defer end.Stop()
	for message := []byte(": hello\n\n"); ; {
		// Whoever does not read for so long loses the connection, and may come again.
		_ = control.SetWriteDeadline(time.Now().Add(writeTimeout)) // not every ResponseWriter can
		if _, err := w.Write(message); err != nil || control.Flush() != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-end.C:
			return
		case <-beat.C:
			message = []byte(": still here\n\n")
		case m, open := <-messages:
			if !open {
				return
			}
			message = m
		}
	}
}

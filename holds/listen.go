package holds

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Notice is what Listen hears: a committed transition, or that some may have been missed.
type Notice struct {
	Missed bool `json:"missed,omitempty"` // earlier transitions may not have been heard; the other fields are empty

	Tenant  string    `json:"tenant,omitempty"`
	ID      string    `json:"id,omitempty"`
	Version int       `json:"version,omitempty"` // the hold's, after the transition
	Kind    EventKind `json:"kind,omitempty"`
}

// ListenOptions says how Listen keeps its connection. The zero value suits most callers.
type ListenOptions struct {
	// Idle is how long a silent connection is trusted, and then how long the server has to answer, 10ms to
	// 1h. A dead connection is noticed after twice that. Defaults to 15s.
	Idle time.Duration
	// OnError is told, in another goroutine, why a connection was lost, before each new attempt. Defaults to none.
	OnError func(error)
}

const (
	minIdle, maxIdle   = 10 * time.Millisecond, time.Hour
	connectTimeout     = 30 * time.Second
	closeTimeout       = time.Second
	minRetry, maxRetry = 100 * time.Millisecond, 10 * time.Second
	maxQueued          = 10_000
)

// Listen calls handle with every transition that a Book with Config.Notify commits in this schema, one at a time, in
// the order of commit. An expiry is heard when Sweep or Expire announces it. It returns an *ArgumentError, ctx.Err() or
// handle's error.
//
// A notice is a hint, not a record: Postgres keeps none for a listener that is away. After each connect handle first
// gets a notice with Missed. If handle then reads what it needs (List, Get, Usage) it misses nothing, but may hear of a
// transition again: compare the Version. Missed also stands for a notice that cannot be understood, and for all that
// wait once more than 10,000 do. A slow handle delays this listener only.
//
// Listen makes a connection of its own with pool's configuration. It must lead to the primary, and not through a pooler
// in transaction mode: such a listener hears nothing, without an error. Pass a pool made for Listen if yours is behind
// one. After a lost connection it retries, first within 0.1s, in the end every 5s to 10s.
func (b *Book) Listen(ctx context.Context, pool *pgxpool.Pool, opts ListenOptions, handle func(context.Context, Notice) error) error {
	if err := cmp.Or(b.made(), notNil("pool", pool), notNil("handle", handle)); err != nil {
		return err
	}
	if opts.Idle == 0 {
		opts.Idle = DefaultIdle
	}
	switch {
	case len(b.Channel()) > 63: // LISTEN would cut it, and no Book can notify on it
		return invalid("ledger", "the channel %q is longer than the 63 bytes of a name: use a shorter schema", b.Channel())
	case opts.Idle < minIdle || opts.Idle > maxIdle:
		return invalid("ListenOptions.Idle", "%v is not from %v to %v", opts.Idle, minIdle, maxIdle)
	}
	l := &listener{channel: b.Channel(), config: pool.Config(), opts: opts, wake: make(chan struct{}, 1)}
	reading, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		l.read(reading)
	}()
	defer func() {
		stop()
		<-stopped
	}()
	for {
		n, err := l.next(ctx)
		if err == nil {
			err = handle(ctx, n)
		}
		if err != nil {
			return err
		}
	}
}

// listener is one call of Listen: a goroutine reads, another handles.
type listener struct {
	channel string
	config  *pgxpool.Config
	opts    ListenOptions

	mu     sync.Mutex
	queued []Notice
	wake   chan struct{} // has an element if something may be queued
}

// next returns the oldest notice, once there is one.
func (l *listener) next(ctx context.Context) (Notice, error) {
	for {
		if err := ctx.Err(); err != nil {
			return Notice{}, err
		}
		if n, ok := l.take(); ok {
			return n, nil
		}
		select {
		case <-ctx.Done():
		case <-l.wake:
		}
	}
}

func (l *listener) take() (n Notice, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queued) == 0 {
		return Notice{}, false
	}
	n, l.queued = l.queued[0], l.queued[1:]
	return n, true
}

// add queues a notice. Too many make way for one that says so: whoever gets that reads
// anew what they were about.
func (l *listener) add(n Notice) {
	l.mu.Lock()
	last := len(l.queued) - 1
	switch {
	case n.Missed && last >= 0 && l.queued[last].Missed:
	case len(l.queued) == maxQueued:
		l.queued = []Notice{{Missed: true}}
	default:
		l.queued = append(l.queued, n)
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// read listens on one connection after the other until ctx ends.
func (l *listener) read(ctx context.Context) {
	for wait := minRetry; ; wait = min(2*wait, maxRetry) {
		began := time.Now()
		err := l.session(ctx)
		if ctx.Err() != nil {
			return
		}
		if l.opts.OnError != nil {
			l.opts.OnError(fmt.Errorf("holds: listen: %w", err))
		}
		if time.Since(began) > maxRetry { // it was a good connection, if it was one
			wait = minRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2)): // not all listeners at once
		}
	}
}

// session listens on one connection until that fails.
func (l *listener) session(ctx context.Context) error {
	conn, err := l.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	l.add(Notice{Missed: true})
	for {
		waiting, cancel := context.WithTimeout(ctx, l.opts.Idle)
		n, err := conn.WaitForNotification(waiting)
		idle := waiting.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case n != nil:
			l.add(parseNotice(n.Payload))
		case err != nil && (!idle || conn.IsClosed()):
			return err
		default: // a connection that nobody answers on does not end by itself
			asking, cancel := context.WithTimeout(ctx, l.opts.Idle)
			err := conn.Ping(asking)
			cancel()
			if err != nil {
				return err
			}
		}
	}
}

// connect returns a connection on which LISTEN is in effect.
func (l *listener) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	config := l.config.ConnConfig.Copy()
	config.OnNotification = nil // with another's, WaitForNotification would return none
	if l.config.BeforeConnect != nil {
		if err := l.config.BeforeConnect(ctx, config); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, `listen `+pgx.Identifier{l.channel}.Sanitize()); err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}

// announced are the kinds as schema.sql's function announce is given them.
var announced = map[string]EventKind{
	"placed": EventPlaced, "captured_part": EventCapturedPart, "returned_part": EventReturnedPart, "captured": EventCaptured, "extended": EventExtended,
	"released": EventReleased, "expired": EventExpired, "returned": EventReturned,
}

// parseNotice reads a payload. Anybody can notify on a channel, and a later schema
// may say what this build does not know: that is something missed.
func parseNotice(payload string) Notice {
	var p struct {
		Tenant, ID, Kind string
		Version          int
	}
	err := json.Unmarshal([]byte(payload), &p)
	kind, known := announced[p.Kind]
	if err != nil || !known || p.ID == "" || p.Version < 1 {
		return Notice{Missed: true}
	}
	return Notice{Tenant: p.Tenant, ID: p.ID, Version: p.Version, Kind: kind}
}

// Package listen follows a channel of Postgres through reconnects, and says when something may
// have been missed.
package listen

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Channel configures a listener.
type Channel[N any] struct {
	Name   string
	Config *pgxpool.Config // of the listener's own connection

	// Parse reads a payload, or reports that it cannot.
	Parse func(payload string) (N, bool)
	// Missed stands for notices that were lost or not understood.
	Missed N

	Idle    time.Duration // how long a silent connection is trusted
	OnError func(error)   // is called when a connection is lost. May be nil
}

// Bounds of the callers' settings.
const (
	MaxNameBytes = 63 // of a channel: LISTEN would cut a longer one
	DefaultIdle  = 15 * time.Second

	minIdle, maxIdle = 10 * time.Millisecond, time.Hour
)

// Commands is the channel on which a schema's commands and jobs are announced.
func Commands(schema string) string { return schema + "_commands" }

// Parked is the channel on which the schema says that parked jobs may fit.
func Parked(schema string) string { return schema[:min(len(schema), 56)] + "_parked" }

const (
	connectTimeout     = 30 * time.Second
	closeTimeout       = time.Second
	minRetry, maxRetry = 100 * time.Millisecond, 10 * time.Second

	// The most that a slow handle may leave waiting: notices, and bytes of payload.
	maxQueued      = 10_000
	maxQueuedBytes = 16 << 20

	// Anybody may send notices. handle is called so often in a second at most, and others wait, or
	// are missed.
	maxPerSecond = 1000
)

// Idle is the Channel.Idle to use, and the reason if asked is refused.
func Idle(asked time.Duration) (idle time.Duration, wrong string) {
	switch {
	case asked == 0:
		return DefaultIdle, ""
	case asked < minIdle || asked > maxIdle:
		return 0, fmt.Sprintf("%v is not from %v to %v", asked, minIdle, maxIdle)
	}
	return asked, ""
}

// Wrapped is onError for errors of that package, or nil.
func Wrapped(pkg string, onError func(error)) func(error) {
	if onError == nil {
		return nil
	}
	return func(err error) { onError(fmt.Errorf("%s: listen: %w", pkg, err)) }
}

// Run calls handle with each notice, one at a time, until ctx ends or handle returns an error.
func Run[N any](ctx context.Context, c Channel[N], handle func(context.Context, N) error) error {
	l := &listener[N]{Channel: c, wake: make(chan struct{}, 1)}
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
	return l.handle(ctx, handle)
}

// handle calls handle with each notice.
func (l *listener[N]) handle(ctx context.Context, handle func(context.Context, N) error) error {
	for handled, since := 0, time.Now(); ; handled++ {
		if handled == maxPerSecond {
			select {
			case <-ctx.Done():
			case <-time.After(time.Until(since.Add(time.Second))):
			}
			handled = 0
		}
		n, err := l.next(ctx)
		if handled == 0 || time.Since(since) > time.Second {
			handled, since = 0, time.Now()
		}
		if err == nil {
			err = handle(ctx, n)
		}
		if err != nil {
			return err
		}
	}
}

// listener is one call of Run: a goroutine reads, another handles.
type listener[N any] struct {
	Channel[N]

	mu     sync.Mutex
	queued []queued[N]
	bytes  int           // of the queue
	wake   chan struct{} // has an element if something may be queued
}

type queued[N any] struct {
	notice N
	bytes  int // of its payload
	missed bool
}

// next returns the oldest notice, once there is one.
func (l *listener[N]) next(ctx context.Context) (n N, err error) {
	for {
		if err := ctx.Err(); err != nil {
			return n, err
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

func (l *listener[N]) take() (n N, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queued) == 0 {
		return n, false
	}
	first := l.queued[0]
	l.queued, l.bytes = l.queued[1:], l.bytes-first.bytes
	return first.notice, true
}

// hear queues a payload.
func (l *listener[N]) hear(payload string) {
	if n, ok := l.Parse(payload); ok {
		l.add(queued[N]{notice: n, bytes: len(payload)})
		return
	}
	l.miss()
}

func (l *listener[N]) miss() { l.add(queued[N]{notice: l.Missed, missed: true}) }

// add queues a notice. A full queue makes way for one that says so: its reader reads anew.
func (l *listener[N]) add(q queued[N]) {
	l.mu.Lock()
	last := len(l.queued) - 1
	switch {
	case q.missed && last >= 0 && l.queued[last].missed:
	case len(l.queued) == maxQueued || l.bytes+q.bytes > maxQueuedBytes:
		l.queued, l.bytes = []queued[N]{{notice: l.Missed, missed: true}}, 0
	default:
		l.queued, l.bytes = append(l.queued, q), l.bytes+q.bytes
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// read listens on one connection after the other until ctx ends.
func (l *listener[N]) read(ctx context.Context) {
	for wait := minRetry; ; wait = min(2*wait, maxRetry) {
		began := time.Now()
		err := l.session(ctx)
		if ctx.Err() != nil {
			return
		}
		if l.OnError != nil {
			l.OnError(err)
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
func (l *listener[N]) session(ctx context.Context) error {
	conn, err := l.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	l.miss()
	for {
		waiting, cancel := context.WithTimeout(ctx, l.Idle)
		n, err := conn.WaitForNotification(waiting)
		idle := waiting.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case n != nil:
			l.hear(n.Payload)
		case err != nil && (!idle || conn.IsClosed()):
			return err
		default: // a connection that nobody answers on does not end by itself
			asking, cancel := context.WithTimeout(ctx, l.Idle)
			err := conn.Ping(asking)
			cancel()
			if err != nil {
				return err
			}
		}
	}
}

// connect returns a connection on which LISTEN is in effect.
func (l *listener[N]) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	config := l.Config.ConnConfig.Copy()
	config.OnNotification = nil // with another's, WaitForNotification would return none
	if l.Config.BeforeConnect != nil {
		if err := l.Config.BeforeConnect(ctx, config); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, `listen `+pgx.Identifier{l.Name}.Sanitize()); err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}

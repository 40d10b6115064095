package pgtest

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A Deadline is a context with a deadline that passes when the test says so. The library reads from
// it how long a statement may take, and on a slow machine the server is still the one that gives
// up.
type Deadline struct {
	context.Context
	at     atomic.Int64
	passed chan struct{}
	once   sync.Once
}

// NewDeadline returns a deadline that is left away. It passes at the latest when the test's
// Patience ends, for a server that never gives up, and when the test ends.
func NewDeadline(t testing.TB, left time.Duration) *Deadline {
	d := &Deadline{Context: t.Context(), passed: make(chan struct{})}
	d.Set(left)
	context.AfterFunc(t.Context(), d.Pass)
	time.AfterFunc(time.Until(Patience(t)), d.Pass)
	return d
}

// Set moves the deadline to left from now.
func (d *Deadline) Set(left time.Duration) { d.at.Store(time.Now().Add(left).UnixNano()) }

// Pass lets the deadline pass.
func (d *Deadline) Pass() { d.once.Do(func() { close(d.passed) }) }

func (d *Deadline) Deadline() (time.Time, bool) { return time.Unix(0, d.at.Load()), true }

func (d *Deadline) Done() <-chan struct{} { return d.passed }

func (d *Deadline) Err() error {
	select {
	case <-d.passed:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

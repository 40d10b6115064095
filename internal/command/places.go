package command

import (
	"context"
	"runtime"
	"sync"
	"time"
	"weak"

	"github.com/jackc/pgx/v5/pgxpool"
)

// turns are those of calls that have collided, by the lock that they met at: within the process
// their next attempts run one after the other. Above READ COMMITTED the lock cannot do that, since
// a writer that has waited for it has a snapshot from before, and all but one of the waiting calls
// have to run again.
type turns [64]chan struct{}

func newTurns() *turns {
	var t turns
	for i := range t {
		t[i] = make(chan struct{}, 1)
	}
	return &t
}

// take waits for the turn of a lock, no longer than the lock timeout, and returns the function that
// ends the turn.
func (t *turns) take(ctx context.Context, key int64, wait time.Duration) (over func()) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	turn := t[uint64(key)%uint64(len(t))]
	select {
	case turn <- struct{}{}:
		return func() { <-turn }
	case <-ctx.Done():
		return func() {}
	}
}

// all has a channel for each pool, with one place less than the pool has connections:
// so many attempts of operations with a First may run at once, and one connection is
// left for that. It belongs to the pool and not to an Engine, since two engines of one
// pool could otherwise wait for each other's connections.
var all sync.Map // of weak.Pointer[pgxpool.Pool]

func places(pool *pgxpool.Pool) chan struct{} {
	if pool == nil {
		return nil
	}
	key := weak.Make(pool)
	fresh := make(chan struct{}, max(0, pool.Config().MaxConns-1))
	if there, loaded := all.LoadOrStore(key, fresh); loaded {
		return there.(chan struct{})
	}
	runtime.AddCleanup(pool, func(key weak.Pointer[pgxpool.Pool]) { all.Delete(key) }, key)
	return fresh
}

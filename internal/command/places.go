package command

import (
	"runtime"
	"sync"
	"weak"

	"github.com/jackc/pgx/v5/pgxpool"
)

// all has a channel for each pool, with one place less than the pool has connections:
// so many attempts of operations with a First may run at once, and one connection is
// left for that. It belongs to the pool and not to an Engine, since two engines of one
// pool could otherwise wait for each other's connections.
var all sync.Map // of weak.Pointer[pgxpool.Pool]

func places(pool *pgxpool.Pool) chan struct{} {
	key := weak.Make(pool)
	fresh := make(chan struct{}, max(0, pool.Config().MaxConns-1))
	if there, loaded := all.LoadOrStore(key, fresh); loaded {
		return there.(chan struct{})
	}
	runtime.AddCleanup(pool, func(key weak.Pointer[pgxpool.Pool]) { all.Delete(key) }, key)
	return fresh
}

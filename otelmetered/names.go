package otelmetered

import (
	"maps"
	"sync"
	"sync/atomic"
)

// other stands for the names of a label beyond its bound.
const other = "other"

// names are the values of a label that the program chooses: the first ones that come, and then
// other.
type names struct {
	max   int64
	count atomic.Int64
	known sync.Map // of string
	full  func()   // is called for each value that is counted as other
}

func (n *names) of(name string) string {
	if _, ok := n.known.Load(name); ok || name == "" {
		return name
	}
	if n.count.Load() < n.max {
		if _, ok := n.known.LoadOrStore(name, true); ok || n.count.Add(1) <= n.max {
			return name
		}
		n.known.Delete(name)
	}
	n.full()
	return other
}

// memo remembers values made of few keys. Reading takes no lock and allocates nothing.
type memo[K comparable, V any] struct {
	mu    sync.Mutex // of writers
	known atomic.Pointer[map[K]V]
}

func (m *memo[K, V]) of(key K, make func() V) V {
	if known := m.known.Load(); known != nil {
		if v, ok := (*known)[key]; ok {
			return v
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	next := map[K]V{}
	if known := m.known.Load(); known != nil {
		if v, ok := (*known)[key]; ok {
			return v
		}
		next = maps.Clone(*known)
	}
	next[key] = make()
	m.known.Store(&next)
	return next[key]
}

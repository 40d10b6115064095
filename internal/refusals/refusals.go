// Package refusals remembers which scopes refused lately.
package refusals

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/pgmetered/metered/budget"
)

// Recent are the scopes that a client saw refuse lately: there a command is looked at before its
// function runs. They are a matter of speed alone. The zero value is ready for use.
type Recent struct {
	mu         sync.Mutex
	young, old map[string]bool // since turned, and in the turn before
	turned     time.Time
}

const (
	turnLength = 10 * time.Second // a scope is kept for one to two turns
	maxScopes  = 10_000           // of a turn
)

// turn forgets old refusals. The caller has the lock.
func (r *Recent) turn(now time.Time) {
	switch age := now.Sub(r.turned); {
	case age >= 2*turnLength:
		r.young, r.old, r.turned = nil, nil, now
	case age >= turnLength:
		r.young, r.old, r.turned = nil, r.young, now
	}
}

// Add keeps the scopes that err refuses, if it does.
func (r *Recent) Add(now time.Time, err error) {
	var exceeded *budget.ExceededError
	if !errors.As(err, &exceeded) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turn(now)
	if r.young == nil {
		r.young = make(map[string]bool)
	}
	for _, refusal := range exceeded.Refusals {
		if len(r.young) < maxScopes {
			r.young[refusal.Scope] = true
		}
	}
}

// Seen reports whether one of the charges' scopes refused lately.
func (r *Recent) Seen(now time.Time, charges []budget.Charge) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turn(now)
	return len(r.young)+len(r.old) > 0 &&
		slices.ContainsFunc(charges, func(c budget.Charge) bool { return r.young[c.Scope] || r.old[c.Scope] })
}

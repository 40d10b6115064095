package console

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pgmetered/metered/internal/inspect"
)

const (
	walkEvery = time.Minute // all scopes are looked at so often, while somebody looks at the overview
	walkKept  = 2 * nearlyShown
)

// walk looks at all scopes, up to a thousand of them at each reading of the overview: a page may
// read only so much.
type walk struct {
	mu      sync.Mutex
	current *inspect.Walk
	last    *inspect.Walk // the one that came to the end, or the part of the first one
	next    time.Time     // when another may begin
}

// look goes on, and returns the scopes of which least is left, and the wallets. looked is not 0
// while the first walk has not come to the end: it has looked at so many.
func (w *walk) look(ctx context.Context, h *Handler,
	in *inspect.Reader) (scopes, wallets []string, looked int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil && !time.Now().Before(w.next) {
		w.current = &inspect.Walk{Limits: h.cfg.Limits, Keep: walkKept}
	}
	if w.current != nil {
		more, err := w.current.More(ctx, in)
		if err != nil {
			return nil, nil, 0, err
		}
		if !more {
			w.last, w.current, w.next = w.current, nil, time.Now().Add(walkEvery)
		} else if w.last == nil {
			looked = w.current.Scopes
		}
	}
	for _, found := range []*inspect.Walk{w.last, w.current} {
		if found == nil {
			continue
		}
		for _, room := range slices.Concat(found.Nearly, found.Credit) {
			scopes = append(scopes, room.Scope)
		}
		for _, room := range found.Wallets {
			wallets = append(wallets, room.Scope)
		}
	}
	return scopes, wallets, looked, nil
}

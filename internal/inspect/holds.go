package inspect

import (
	"context"

	"github.com/pgmetered/metered/holds"
)

// HoldFilter selects holds. A zero field selects all; the others must all match.
type HoldFilter struct {
	Tenant *string // nil: of every tenant
	Scope  string  // with a line of this scope
	State  holds.State
	After  string // continues a list: HoldList.Next of the page before
	Limit  int    // the size of a page, 1 to MaxPage; defaults to DefaultPage
}

// HoldList is a page of holds.
type HoldList struct {
	Holds []holds.Hold `json:"holds"`
	Next  string       `json:"next,omitempty"` // continues the list; "" at its end
}

// Holds lists holds of any tenant. Those that are held of a scope (Scope, and State Held) come in the order in which they
// fall due; all others newest first. Of those a page looks at MaxLooked holds: it may be empty and have a Next. For one
// tenant, and by holder, entity or claim, see Book.List; for what falls due next, Book.Due.
func (r *Reader) Holds(ctx context.Context, f HoldFilter) (HoldList, error) {
	return HoldList{}, nil
}

// HoldDetail is a hold, and what happened to it.
type HoldDetail struct {
	Hold    holds.Hold    `json:"hold"`
	History []holds.Event `json:"history"` // oldest first
}

// Hold returns a hold with its history, or the errors of Book.Get.
func (r *Reader) Hold(ctx context.Context, tenant, id string) (HoldDetail, error) {
	return HoldDetail{}, nil
}

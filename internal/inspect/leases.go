package inspect

import (
	"context"

	"github.com/pgmetered/metered/leases"
)

// LeaseState selects leases.
type LeaseState string

const (
	LeaseOut     LeaseState = "out"   // open, and its time is not over
	LeaseEnded   LeaseState = "ended" // its time is over, and it is not settled
	LeaseOpen    LeaseState = "open"  // both of these
	LeaseSettled LeaseState = "settled"
)

// LeaseFilter selects leases. A zero field selects all; the others must all match.
type LeaseFilter struct {
	Scope string
	State LeaseState
	After string // continues a list: LeaseList.Next of the page before
	Limit int    // the size of a page, 1 to MaxPage; defaults to DefaultPage
}

// LeaseList is a page of leases.
type LeaseList struct {
	Leases []leases.Lease `json:"leases"`
	Next   string         `json:"next,omitempty"` // continues the list; "" at its end
}

// Leases lists leases: those that are open (Out, Ended, Open) in the order in which they end; all others newest first. Of
// those, a page without a Scope looks at MaxLooked leases: it may be empty and have a Next.
func (r *Reader) Leases(ctx context.Context, f LeaseFilter) (LeaseList, error) {
	return LeaseList{}, nil
}

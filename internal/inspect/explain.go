package inspect

import (
	"context"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
)

// Explanation says whether a charge would be let in now, and what counts against it.
type Explanation struct {
	Now    time.Time `json:"now"`
	Scope  string    `json:"scope"`
	Amount int64     `json:"amount"`
	Fits   bool      `json:"fits"` // it would be let in
	// Reason is the error of the charge, if it does not fit: a limit, a scope that is closed or must exist, a window
	// that reaches behind a purge, a clock that is ahead. Code is its code.
	Reason string `json:"reason,omitempty"`
	Code   string `json:"code,omitempty"`
	// FitsAfter is how long until it fits if nothing else happens, budget.Never if waiting does not help, 0 if it fits.
	FitsAfter time.Duration    `json:"fits_after_ns"`
	FitsAt    time.Time        `json:"fits_at,omitzero"` // zero for never, and if it fits
	Limits    []ExplainedLimit `json:"limits"`           // in the order of the charge
	Usage     budget.Usage     `json:"usage"`            // over the scope's lifetime
	Holds     []holds.Hold     `json:"holds,omitempty"`  // what is held of the scope, first due first, up to 20
	Leases    []leases.Lease   `json:"leases,omitempty"` // what is out on leases, first to end first, up to 20
}

// ExplainedLimit is one limit of the charge.
type ExplainedLimit struct {
	Limit     budget.Limit    `json:"limit"`
	Used      int64           `json:"used"` // counts against it, holds and leases aside
	Held      int64           `json:"held"`
	Leased    int64           `json:"leased"`
	Available int64           `json:"available"`         // the largest amount that it admits
	Refusal   *budget.Refusal `json:"refusal,omitempty"` // nil if it lets the charge in
	// Oldest are the first entries inside the window, up to 20: they leave it first. None of a lifetime.
	Oldest []budget.Entry `json:"oldest,omitempty"`
	Purged bool           `json:"purged,omitempty"` // the window reaches behind a purge: what is used is not known
}

// Explain says what a charge would answer now. It is not binding: it takes no lock, and the next charge may change it.
// Charge.Note and NoStandings do not matter; Limit.MaxFrom is refused, since it runs SQL of the caller's.
func (r *Reader) Explain(ctx context.Context, charge budget.Charge) (Explanation, error) {
	return Explanation{}, nil
}

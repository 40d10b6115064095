package inspect

import (
	"context"
	"time"
)

// Scope is what a scope stands at, by its last entry: holds that are due and not swept are still in Held, and units out
// on leases too. Ledger.Usage has the exact state.
type Scope struct {
	Scope    string    `json:"scope"`
	Seq      int64     `json:"seq"` // the number of its last entry: how many were ever made
	Last     time.Time `json:"last"`
	Spent    int64     `json:"spent"`
	Refunded int64     `json:"refunded"`
	Credited int64     `json:"credited"`
	Used     int64     `json:"used"` // Spent - Refunded - Credited
	Held     int64     `json:"held"`
	Epoch    int       `json:"epoch"`            // clock repairs so far
	Closed   bool      `json:"closed,omitempty"` // it was carved from another, and nothing new is let in
}

// ScopeList is a page of scopes, by name.
type ScopeList struct {
	Scopes []Scope `json:"scopes"`
	Next   string  `json:"next,omitempty"` // continues the list, as after; "" at its end
}

// Scopes lists the scopes that have entries, whose names begin with prefix and come after the name after, in the order
// of bytes.
func (r *Reader) Scopes(ctx context.Context, prefix, after string, limit int) (ScopeList, error) {
	return ScopeList{}, nil
}

// ScopeDetail is all there is to know of a scope.
type ScopeDetail struct {
	Scope
	Now         time.Time     `json:"now"`
	First       time.Time     `json:"first"`             // when its first entry was made
	Leased      int64         `json:"leased"`            // what open leases keep and have not spent
	HeldNow     int64         `json:"held_now"`          // what open holds keep, leases aside; without those that are due
	HoldDue     time.Time     `json:"hold_due,omitzero"` // when an open hold may fall due, if HeldNow > 0
	Purged      bool          `json:"purged,omitempty"`  // entries behind the first are gone
	Created     time.Time     `json:"created,omitzero"`  // when it was declared (Ledger.CreateScopes); zero if it was not
	Retired     time.Time     `json:"retired,omitzero"`
	Parent      string        `json:"parent,omitempty"` // the scope that it was carved from
	LockKey     int64         `json:"lock_key,string"`
	Rates       []Rate        `json:"rates"`   // of the last minute, hour and day
	Waiting     int           `json:"waiting"` // backends that wait for its lock now
	LongestWait time.Duration `json:"longest_wait_ns"`
}

// Rate is what was written to a scope of late.
type Rate struct {
	Within  time.Duration `json:"within_ns"`
	Entries int64         `json:"entries"`
	Units   int64         `json:"units"` // charged, refunds not taken off
	// Purged: entries of this time were purged, and are not counted.
	Purged bool `json:"purged,omitempty"`
}

// Scope returns what there is to know of one scope, or ErrUnknown if it has no entries and was never declared.
func (r *Reader) Scope(ctx context.Context, name string) (ScopeDetail, error) {
	return ScopeDetail{}, nil
}

// Ahead is a scope whose last entry is ahead of the clock.
type Ahead struct {
	Scope string        `json:"scope"`
	Seq   int64         `json:"seq"`
	Last  time.Time     `json:"last"`
	Ahead time.Duration `json:"ahead_ns"`
}

// AheadList is a page of scopes that are ahead of the clock.
type AheadList struct {
	Scopes []Ahead `json:"scopes"`
	Looked int     `json:"looked"`         // so many scopes were looked at
	Next   string  `json:"next,omitempty"` // continues, as after; "" when every scope was looked at
}

// ClockAhead returns the scopes after the name after whose last entry is ahead of the clock by more than least. A call
// looks at MaxLooked/4 scopes, so a page may be empty and have a Next.
func (r *Reader) ClockAhead(ctx context.Context, after string, least time.Duration) (AheadList, error) {
	return AheadList{}, nil
}

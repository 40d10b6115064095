package inspect

import (
	"context"
	"time"
)

// Count is a number of rows.
type Count struct {
	N int64 `json:"n"`
	// Kind says how it was found: "exact"; "estimated", from the planner's statistics; or "at least", where counting
	// ended at MaxLooked.
	Kind CountKind `json:"kind"`
}

// CountKind says how a Count was found.
type CountKind string

const (
	Exact     CountKind = "exact"
	Estimated CountKind = "estimated"
	AtLeast   CountKind = "at least"
	Unknown   CountKind = "unknown" // the table is large, and was never analysed
)

// Overview is the state of a schema on one screen.
type Overview struct {
	Now     time.Time `json:"now"` // the database's clock
	Version int       `json:"version"`
	Scopes  Count     `json:"scopes"`
	Entries Count     `json:"entries"`
	// Operations are the records kept; InFlight are the commands that run now, of which Waiting wait for a lock.
	Operations Count `json:"operations"`
	InFlight   int   `json:"in_flight"`
	Waiting    int   `json:"waiting"`

	OpenHolds Count `json:"open_holds"` // held, and not due
	// Unswept holds have expired and were not announced. OldestDue is when the first of them fell due, and SweepLag how
	// long ago that was: zero if none is.
	Unswept   Count         `json:"unswept"`
	OldestDue time.Time     `json:"oldest_due,omitzero"`
	SweepLag  time.Duration `json:"sweep_lag_ns"`
	NextDue   time.Time     `json:"next_due,omitzero"` // when the next open hold falls due

	LeasesOut   Count `json:"leases_out"`   // open, and their time is not over
	UnitsOut    int64 `json:"units_out"`    // granted to those (that were counted)
	LeasesEnded Count `json:"leases_ended"` // their time is over, and they are not settled: their units are out of reach
	// ClockAhead is how far the newest entry or record is ahead of the clock, of those that were written last; 0 if it
	// is not. Reader.ClockAhead looks at every scope.
	ClockAhead time.Duration `json:"clock_ahead_ns"`
}

// Overview returns the state of the schema.
func (r *Reader) Overview(ctx context.Context) (Overview, error) {
	return Overview{}, nil
}

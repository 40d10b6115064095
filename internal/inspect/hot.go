package inspect

import (
	"context"
	"time"
)

// Hot is a scope that was written of late, or that somebody waits for.
type Hot struct {
	Scope   string        `json:"scope"`      // "" for a lock of none of the scopes that were looked at: another scope's, an operation's, a hold's, a lease's
	Key     int64         `json:"key,string"` // of its lock
	Entries int64         `json:"entries"`    // in the time asked for
	Units   int64         `json:"units"`      // charged in that time
	PerSec  float64       `json:"entries_per_second"`
	UnitsPS float64       `json:"units_per_second"`
	Last    time.Time     `json:"last,omitzero"`   // when the last entry was made
	Waiting int           `json:"waiting"`         // backends that wait for the scope's lock now
	Longest time.Duration `json:"longest_wait_ns"` // how long the first of them has waited
}

// HotList are the hottest scopes.
type HotList struct {
	Now    time.Time     `json:"now"`
	Within time.Duration `json:"within_ns"` // what was asked for
	Scopes []Hot         `json:"scopes"`    // those waited for first, by how many wait; then by entries
}

// Hot returns the scopes that got most entries within the time before now, 1s to 24h, and those whose lock somebody waits
// for now.
//
// The numbers of each scope are exact. Which scopes are looked at is not: they are those of the newest MaxLooked
// records of operations, and of the ledger's last pages. A scope that is charged outside of commands alone can be missed
// where a purge has made room for new entries in older pages.
func (r *Reader) Hot(ctx context.Context, within time.Duration, limit int) (HotList, error) {
	return HotList{}, nil
}

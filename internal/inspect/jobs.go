package inspect

import (
	"context"
	"time"
)

// Job is one of River's jobs, without its args.
type Job struct {
	ID          int64     `json:"id"`
	Gone        bool      `json:"gone,omitempty"` // River has deleted it, or a savepoint took it back; the rest is empty
	Kind        string    `json:"kind,omitempty"`
	Queue       string    `json:"queue,omitempty"`
	State       string    `json:"state,omitempty"` // River's word
	Attempt     int       `json:"attempt"`
	MaxAttempts int       `json:"max_attempts,omitempty"`
	Priority    int       `json:"priority,omitempty"`
	Created     time.Time `json:"created,omitzero"`
	Scheduled   time.Time `json:"scheduled,omitzero"`
	Attempted   time.Time `json:"attempted,omitzero"`
	Finalized   time.Time `json:"finalized,omitzero"`
	Error       string    `json:"error,omitempty"` // of its last attempt that failed
	Key         string    `json:"key,omitempty"`   // jobs.Options.Key
	Tenant      string    `json:"tenant,omitempty"`
}

// JobList are jobs by their ids.
type JobList struct {
	Jobs []Job `json:"jobs"`
	// Unreadable says why only the ids are known: there is no such table, or the role may not read it. Else it is "".
	Unreadable string `json:"unreadable,omitempty"`
}

// Jobs returns River's jobs of these ids, up to MaxPage, in this order.
func (r *Reader) Jobs(ctx context.Context, ids []int64) (JobList, error) {
	return JobList{}, nil
}

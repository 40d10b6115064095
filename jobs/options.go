package jobs

import (
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Options are a job's options beside its args. Nil and the zero value mean River's defaults, without a key.
type Options struct {
	// Key makes the Enqueue idempotent within the job's queue: 1 to 255 bytes of UTF-8 without NUL. All kinds and
	// tenants share a queue's keys, so name the thing that it belongs to: "asset/42". Defaults to none.
	Key string
	// Tenant is whom the job is for, at most 255 bytes of UTF-8 without NUL, stored in its metadata. The same key for
	// another tenant is a conflict. Defaults to none.
	Tenant string
	// InsertOpts are River's, and win over the args' own and the client's. Only the queue is part of what a
	// key stands for. UniqueOpts, also of the args, cannot be combined with a Key.
	InsertOpts river.InsertOpts
}

// Item is one job of EnqueueMany.
type Item struct {
	Args    river.JobArgs
	Options *Options
}

// Result says which job there is now.
type Result struct {
	JobID int64 `json:"job_id"` // in River, which may have deleted the job unless Created
	// Created is true if this call inserted the job, and false for a known key, or a job found by River's UniqueOpts.
	Created bool              `json:"created"`
	Job     *rivertype.JobRow `json:"job,omitempty"` // the row as River's insert returned it, or nil for a known key
}

// Enqueued is a job that was made, with River's id, as a metered.Notice tells it.
type Enqueued struct {
	ID     int64  `json:"id"`
	Queue  string `json:"queue"`
	Kind   string `json:"kind"`
	Key    string `json:"key,omitempty"`
	Tenant string `json:"tenant,omitempty"`
}

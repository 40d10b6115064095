package jobs

import (
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Options are a job's options beside its args. Nil and the zero value mean River's defaults, without a key.
type Options struct {
	// makes the Enqueue idempotent within the job's queue: 1 to 255 bytes of UTF-8 without NUL. All kinds and tenants share a queue's keys,
	// so name the thing that it belongs to: "asset/42"
	Key        string
	Tenant     string           // the owner of the job, at most 255 bytes of UTF-8 without NUL, stored in its metadata. The same key for another tenant is a conflict
	InsertOpts river.InsertOpts // are River's, and win over the args' own and the client's. UniqueOpts, also of the args, cannot be combined with a Key
}

// Item is one job of EnqueueMany.
type Item struct {
	Args    river.JobArgs
	Options *Options
}

// Result says which job there is now.
type Result struct {
	JobID   int64             `json:"job_id"`        // in River, which may have deleted the job unless Created
	Created bool              `json:"created"`       // this call inserted the job: not for a known key, or a job found by River's UniqueOpts
	Job     *rivertype.JobRow `json:"job,omitempty"` // the row as River's insert returned it, or nil for a known key
}

// Enqueued is a new job in a metered.Notice, with River's id.
type Enqueued struct {
	ID     int64  `json:"id"`
	Queue  string `json:"queue"`
	Kind   string `json:"kind"`
	Key    string `json:"key,omitempty"`
	Tenant string `json:"tenant,omitempty"`
}

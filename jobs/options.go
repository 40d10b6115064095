package jobs

import (
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Nil and zero Options mean River's defaults, without a key.
type Options struct {
	// makes the Enqueue idempotent within the queue, for all kinds and tenants: 1 to 255 bytes of UTF-8 without NUL,
	// such as "asset/42"
	Key        string
	Tenant     string           // the owner, at most 255 bytes of UTF-8 without NUL, in the job's metadata
	InsertOpts river.InsertOpts // win over the args' own and the client's. UniqueOpts, also of the args, exclude a Key
}

// Item is a job to enqueue.
type Item struct {
	Args    river.JobArgs
	Options *Options
}

// Result is the job of an Enqueue.
type Result struct {
	JobID   int64             `json:"job_id"`        // as in Record
	Created bool              `json:"created"`       // this call inserted the job
	Job     *rivertype.JobRow `json:"job,omitempty"` // River's row, nil for a known key
}

// Enqueued is a new job in a metered.Notice, with River's id.
type Enqueued struct {
	ID     int64  `json:"id"`
	Queue  string `json:"queue"`
	Kind   string `json:"kind"`
	Key    string `json:"key,omitempty"`
	Tenant string `json:"tenant,omitempty"`
}

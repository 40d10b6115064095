package jobs

import (
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/holds"
)

// Nil and zero are River's defaults, without a key.
type Options struct {
	// makes the Enqueue idempotent in the queue, for all kinds and tenants: 1 to 255 bytes of UTF-8 without NUL, such as "asset/42"
	Key        string
	Tenant     string           // the owner, up to 255 bytes as in Key, in the job's metadata
	InsertOpts river.InsertOpts // win over the args' own and the client's. UniqueOpts, also of the args, exclude a Key

	// Hold has the units that the job needs: Lines are held until it ends, Charges are spent when it starts. If they do not fit, the job is
	// parked until they do (docs/jobs.md). ID and Holder stay empty, and Tenant is the job's. With a TTL the units are free so long after the
	// start, even if the job goes on. No limit has MaxFrom. Thresholds of limits are reported by the next call
	// that carries them, not by the job's start. It excludes UniqueOpts, ScheduledAt and Pending
	Hold *holds.Request
	// units that the job takes where those of Hold do not fit. A parked job waits for both
	Burst *holds.Request
	// parked jobs of different Fair take turns: up to 255 bytes. Defaults to Tenant. InsertOpts.Priority goes first
	Fair string
	// a job that failed or is snoozed gives the units of its Lines back, and waits for them again from River's time of its next attempt on. Until
	// it starts it is pending in River. Charges count once. Defaults to keeping the units
	GiveBack  bool
	MaxWait   time.Duration // a job parked for so long is dropped, up to ten years. Defaults to for ever
	MaxParked int           // ErrFull if so many jobs wait for the scope. Defaults to any number
}

// Item is a job to enqueue.
type Item struct {
	Args    river.JobArgs
	Options *Options
}

// Result is the job of an Enqueue.
type Result struct {
	JobID   int64             `json:"job_id"`        // as in Record
	Created bool              `json:"created"`       // by this call
	Job     *rivertype.JobRow `json:"job,omitempty"` // River's row, nil for a known key or a parked job
	// the job waits for units. metered.Tx.Enqueue decides it at the command's end
	Parked bool `json:"parked,omitempty"`
}

// Enqueued is a new job in a metered.Notice, with River's id.
type Enqueued struct {
	ID     int64  `json:"id"`
	Queue  string `json:"queue"`
	Kind   string `json:"kind"`
	Key    string `json:"key,omitempty"`
	Tenant string `json:"tenant,omitempty"`
}

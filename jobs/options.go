package jobs

import (
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/holds"
)

// Nil and zero are River's defaults, without a key.
type Options struct {
	// Key names the job within its queue, for all kinds and tenants, in 1 to 255 bytes of UTF-8
	// without NUL, such as "asset/42". The first Enqueue with a key makes the job, and every later
	// one returns it.
	Key string

	// Tenant is the owner of the job, in up to 255 bytes. It is in the job's metadata.
	Tenant string

	// InsertOpts win over those of the args and of the client. UniqueOpts, also of the args, do
	// not go with a Key.
	InsertOpts river.InsertOpts

	// Hold has the units that the job needs: Lines are held until it ends, Charges are spent when
	// it starts. If they do not fit, the job is parked until they do (docs/jobs.md). ID and Holder
	// stay empty, and Tenant is the job's. With a TTL the units are free so long after the start,
	// even if the job goes on. No limit has MaxFrom. Thresholds of limits are reported by the next
	// call that carries them, not by the job's start. It excludes UniqueOpts, ScheduledAt and
	// Pending
	Hold *holds.Placement

	// Burst are the units that the job takes where those of Hold do not fit. A parked job waits
	// for both.
	Burst *holds.Placement

	// FairKey is the key by which parked jobs take turns, in up to 255 bytes. InsertOpts.Priority
	// goes first. Defaults to Tenant.
	FairKey string

	// GiveBack makes a job that failed or is snoozed give the units of its Lines back, and wait
	// for them again from the time on that River has for its next attempt. Until it starts, it is
	// pending in River. Charges count once. Defaults to keeping the units.
	GiveBack bool

	// MaxWait is the time after which a parked job is dropped, up to ten years. Defaults to for
	// ever.
	MaxWait time.Duration

	// MaxParked is the most jobs that may wait for the scope. One more is ErrFull. Defaults to any
	// number.
	MaxParked int
}

// Item is a job to enqueue.
type Item struct {
	Args    river.JobArgs
	Options *Options
}

// Result is the job of an Enqueue.
type Result struct {
	JobID int64 `json:"job_id"` // as in Record

	// Created says that this call made the job.
	Created bool `json:"created"`

	// Job is River's row. It is nil for a known key and for a parked job.
	Job *rivertype.JobRow `json:"job,omitempty"`

	// Parked says that the job waits for units. metered.Tx.Enqueue decides it at the command's
	// end.
	Parked bool `json:"parked,omitempty"`
}

// Enqueued is a new job in a metered.CommandNotice, with River's id.
type Enqueued struct {
	ID     int64  `json:"id"`
	Queue  string `json:"queue"`
	Kind   string `json:"kind"`
	Key    string `json:"key,omitempty"`
	Tenant string `json:"tenant,omitempty"`
}

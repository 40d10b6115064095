package jobs

import (
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Options are what a job may be given beside its args. Nil and the zero value both
// mean: no key, no tenant, River's defaults.
type Options struct {
	// Key makes the Enqueue idempotent within the job's queue: 1 to 255 bytes of
	// UTF-8 without NUL. Keys are one space per queue, for all kinds and tenants
	// together, so begin them with what they belong to: "asset/42". Defaults to
	// none, and a job with every call.
	Key string

	// Tenant is whom the job is for, at most 255 bytes of UTF-8 without NUL. It goes
	// into the job's metadata as MetadataTenant, where Tenant and your dashboards
	// read it. The same key for another tenant is a conflict. Defaults to none.
	Tenant string

	// InsertOpts are River's: queue, priority, attempts, schedule time, tags,
	// metadata, pending. As in River, a field set here wins over the args' own
	// InsertOpts method, and that over the client's Config. They are not part of
	// what a key stands for, except the queue: a repeated key with another priority
	// returns the first job as it is.
	//
	// UniqueOpts, from here or from the args, cannot be combined with a Key, since
	// River would answer with a job of another id.
	InsertOpts river.InsertOpts
}

// Item is one job of EnqueueMany.
type Item struct {
	Args    river.JobArgs
	Options *Options
}

// Result says which job there is now.
type Result struct {
	// JobID is the job's id in River. If Created is false River may have deleted
	// the job since.
	JobID int64 `json:"job_id"`

	// Created is true if this call inserted the job, and false if its key was used
	// before or, without a key, if River's UniqueOpts found a job.
	Created bool `json:"created"`

	// Job is the job's row as River returned it from its insert; nil if the key was
	// used before, since the job is not read then.
	Job *rivertype.JobRow `json:"job,omitempty"`
}

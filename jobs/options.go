package jobs

import (
	"encoding/json"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// Options are how a job is enqueued. Nil and the zero value are River's defaults, without a key.
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

	// Hold are the units that the job needs. If they do not fit, the job is parked until they do
	// (docs/jobs.md). It excludes UniqueOpts, ScheduledAt and Pending. It defaults to none: the job
	// waits for nothing.
	Hold *Units

	// Burst are the units that the job takes where those of Hold do not fit. A parked job waits
	// for both.
	Burst *Units

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

// Units are what a job takes when it starts. The job's id is the hold's ID and Holder, and
// Options.Tenant its Tenant. No limit of them has MaxFrom: Config.Limits is asked instead.
// Thresholds of limits are reported by the next call that carries them, not by the job's start.
type Units struct {
	// Lines are the units that are held until the job ends. Together with Charges they are 1 to 64
	// scopes.
	Lines []holds.Line

	// Charges are the units that are spent when the job starts, for good.
	Charges []budget.Charge

	// TTL is the time from the job's start until its Lines are free, even if the job goes on,
	// within the bounds of holds.Config. It defaults to the job's end, however late.
	TTL time.Duration

	// Grace is the time after the TTL in which the hold can still be captured, up to
	// holds.Config.MaxTTL.
	Grace time.Duration

	// Metadata is any JSON of up to 64 KiB. It is stored with the hold.
	Metadata json.RawMessage

	// Note is the note of the entries.
	Note budget.Note
}

// placement is the request of the units, for package holds.
func (u Units) placement(tenant string) holds.Placement {
	return holds.Placement{Tenant: tenant, Lines: u.Lines, Charges: u.Charges, TTL: u.TTL,
		Grace: u.Grace, Metadata: u.Metadata, Note: u.Note}
}

// Item is a job to enqueue.
type Item struct {
	// Args are the job's arguments, as River takes them. Required.
	Args river.JobArgs

	// Options are the job's options. Defaults to those of an Enqueue without any.
	Options *Options
}

// Result is the job of an Enqueue.
type Result struct {
	// JobID is the job's id in River. A parked job is inserted there with it once it starts.
	JobID int64 `json:"job_id"`

	// Created says that this call made the job.
	Created bool `json:"created"`

	// Job is River's row. It is nil for a known key and for a parked job.
	Job *rivertype.JobRow `json:"job,omitempty"`

	// Parked says that the job waits for units. metered.Tx.Enqueue decides it at the command's
	// end.
	Parked bool `json:"parked,omitempty"`
}

// Enqueued is a job that was enqueued: in a metered.CommandNotice, as Find finds it by its key, and
// as Of reads it from River's row.
type Enqueued struct {
	// ID is the job's id in River, where the job may be deleted by now.
	ID int64 `json:"id"`

	// Queue is the queue of the job.
	Queue string `json:"queue"`

	// Kind is the kind of the job.
	Kind string `json:"kind"`

	// Key is that of the job's Options, or "".
	Key string `json:"key,omitempty"`

	// Tenant is that of the job's Options.
	Tenant string `json:"tenant,omitempty"`

	// Hold is the id of the hold with the Lines of Options.Hold, whose tenant is Tenant. Of alone
	// sets it.
	Hold string `json:"hold,omitempty"`

	// ClaimedAt is when the key was used first. Find alone sets it.
	ClaimedAt time.Time `json:"claimed_at,omitzero"`
}

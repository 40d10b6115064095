package jobs

import (
	"fmt"

	"github.com/pgmetered/metered/internal/fault"
)

// Errors of jobs, beside those that every package has: budget.ErrArgument, ErrBusy and so on.
var (
	// ErrConflict says that another job has the key. Its text says what differs: "kind", "tenant" or
	// "args", which stands for the units of Options.Hold, too.
	ErrConflict error = errConflict

	// ErrNotFound says that the key was never used, or was purged.
	ErrNotFound error = fault.New("job_key_not_found", "jobs: key not found")

	// ErrFull says that Options.MaxParked jobs wait for the scope.
	ErrFull error = errFull

	// ErrNotParked says that the job is not parked, or not any more.
	ErrNotParked error = fault.New("job_not_parked", "jobs: the job is not parked")
)

var (
	errArgument = fault.New("invalid_argument", "jobs: invalid argument")
	errConflict = fault.New("job_conflict", "jobs: conflict")
	errFull     = fault.New("jobs_full", "jobs: too many jobs are parked")
	errPlugin   = fault.New("job_plugin", "jobs: the job did not get the id claimed for it: "+
		"is jobs.Plugin() in river.Config.Plugins, and does every hook leave queue, id and metadata alone?")
)

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// The differences between the first use of a key and a later one.
const (
	differsKind   = "kind"
	differsTenant = "tenant"
	differsArgs   = "args"
)

// conflictError says that another job has the key.
type conflictError struct {
	// Queue and Key name the job that the Enqueue asked for.
	Queue, Key string

	// JobID is the job of the key's first use.
	JobID int64

	// Differs is "kind", "tenant" or "args". It is "args" for the units of Options.Hold, too.
	Differs string
}

func (e *conflictError) Error() string {
	return fmt.Sprintf("jobs: conflict: key %q of queue %q was used before with another %s", e.Key,
		e.Queue, e.Differs)
}

func (e *conflictError) Unwrap() error { return errConflict }

// full is ErrFull with the line in its text.
func full(scope string, most int) error {
	return fmt.Errorf("%w: %d wait for %q", errFull, most, scope)
}

package jobs

import (
	"fmt"

	"github.com/pgmetered/metered/internal/fault"
)

// Errors of calls, besides metered.ErrNotMigrated and metered.ErrNotGranted. Enqueue and EnqueueMany say which of them abort the transaction.
var (
	ErrArgument      error = errArgument                                           // every refused argument: the error is an *ArgumentError, and no SQL ran
	ErrConflict      error = errConflict                                           // the key was used before for another job: the error is a *ConflictError
	ErrBusy          error = fault.ErrBusy                                         // another transaction has had the key for all of Config.LockTimeout
	ErrSerialization error = fault.ErrSerialization                                // SQLSTATE 40001 or 40P01: run the transaction again (metered.Client.RunTx)
	ErrNotFound      error = fault.New("job_key_not_found", "jobs: key not found") // the key was never used, not committed, or purged
	// River gave a keyed job another id than the one claimed. Plugin is missing from river.Config.Plugins, or a hook changed the job's
	// queue, id or metadata
	ErrPlugin error = fault.New("job_plugin", "jobs: the job did not get the id claimed for it: "+
		"is jobs.Plugin() in river.Config.Plugins, and does every hook leave queue, id and metadata alone?")
)

var (
	errArgument = fault.New("invalid_argument", "jobs: invalid argument")
	errConflict = fault.New("job_conflict", "jobs: conflict")
)

// ArgumentError says why an argument was refused. Field: "Options.Key".
type ArgumentError = fault.Argument

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

// ConflictError says that a key was used before, for another job. Its text leaves out the recorded kind, tenant and args: they may be
// somebody else's.
type ConflictError struct {
	Queue, Key string
	JobID      int64  // of the job that the key was first used for
	Differs    string // the first that differs: "kind", "tenant" or "args"
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("jobs: conflict: key %q of queue %q was used before with another %s", e.Key, e.Queue, e.Differs)
}

func (e *ConflictError) Unwrap() error { return errConflict }

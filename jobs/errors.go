package jobs

import (
	"fmt"

	"github.com/pgmetered/metered/internal/fault"
)

// Errors of arguments and of set-up.
var (
	// ErrArgument is the identity of every refused argument. The error itself is an
	// *ArgumentError that names the argument. Nothing was sent to the database.
	ErrArgument error = errArgument

	// ErrPlugin means that River inserted a keyed job under another id than the
	// one claimed for it: Plugin is missing from river.Config.Plugins, or a hook
	// of yours moved the job to another queue, changed its id or took its key out
	// of its metadata. The transaction is aborted.
	ErrPlugin error = fault.New("job_plugin", "jobs: the job did not get the id claimed for it: "+
		"is jobs.Plugin() in river.Config.Plugins, and does every hook leave queue, id and metadata alone?")
)

// Errors of calls.
var (
	// ErrConflict means that the key was used before for something else. The error
	// itself is a *ConflictError.
	ErrConflict error = errConflict

	// ErrBusy means that another open transaction has claimed the key and did not
	// end within Config.LockTimeout. The transaction is aborted; try it again.
	ErrBusy error = fault.ErrBusy

	// ErrNotMigrated means that a table or function is not there: this library's or
	// River's.
	ErrNotMigrated error = fault.ErrNotMigrated

	// ErrNotGranted means that the role has not been given what the call needs, on this
	// library's tables or on River's.
	ErrNotGranted error = fault.ErrNotGranted

	// ErrNotFound means that the key is not there: never used, rolled back, not
	// committed yet, or purged.
	ErrNotFound error = fault.New("job_key_not_found", "jobs: key not found")
)

var (
	errArgument = fault.New("invalid_argument", "jobs: invalid argument")
	errConflict = fault.New("job_conflict", "jobs: conflict")
)

// ArgumentError says which argument was refused, before any SQL ran: Field names it as
// the caller wrote it ("Options.Key"), Reason says what is wrong with it and what is
// allowed. It is ErrArgument.
type ArgumentError = fault.Argument

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// What can differ between the first use of a key and a later one.
const (
	DiffersKind   = "kind"
	DiffersTenant = "tenant"
	DiffersArgs   = "args"
)

// ConflictError says that a key was used before, for another job than the one
// now asked for.
type ConflictError struct {
	Queue, Key string
	// JobID is the id of the job that the key was first used for.
	JobID int64
	// Differs is the first of kind, tenant and args that is not the same.
	Differs string
}

// Error leaves out the recorded kind, tenant and args: whoever chose the same key
// may be somebody else.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("jobs: conflict: key %q of queue %q was used before with another %s", e.Key, e.Queue, e.Differs)
}

// Unwrap returns ErrConflict.
func (e *ConflictError) Unwrap() error { return errConflict }

// Code returns "job_conflict".
func (e *ConflictError) Code() string { return errConflict.Code() }

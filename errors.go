package metered

import (
	"fmt"

	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/migrate"
)

// Refused before any SQL, or by the set-up.
var (
	ErrArgument      error = errArgument          // an *ArgumentError
	ErrSchemaVersion error = migrate.ErrVersion   // the schema is too new, or lacks a function that this build calls
	ErrNotMigrated   error = fault.ErrNotMigrated // the schema or a part of it is missing, or is older
	ErrSchemaDiffers error = migrate.ErrDiffers   // the schema differs from its version as the text says
	ErrNotGranted    error = fault.ErrNotGranted  // the role lacks a grant
)

var errArgument = fault.New("invalid_argument", "metered: invalid argument")

// Answers to an operation id. Nothing was done.
var (
	ErrConflict         error = command.ErrConflict // another command has the id
	ErrRetired          error = command.ErrRetired  // the id's time is not after the purged records: perhaps it ran before
	ErrFuture           error = command.ErrFuture   // the id's time is further ahead of the clock than Config.MaxFuture
	ErrUnknownOperation error = fault.New("operation_unknown", "metered: no such operation")
)

// Failures of a command. Except after ErrIndefinite and ErrCommitUnknown, the call committed nothing.
var (
	ErrBusy          error = fault.ErrBusy          // a lock was not free within the lock timeout
	ErrSerialization error = fault.ErrSerialization // SQLSTATE 40001 or 40P01, in all attempts. In DoTx run tx again
	ErrTimeout       error = command.ErrTimeout     // the server gave up at the deadline: also context.DeadlineExceeded
	ErrTxControl     error = guardtx.ErrControl     // the function, a subscriber or Cost.Write tried to end the transaction
	ErrTxDone        error = guardtx.ErrDone        // the transaction was used after the function had returned
	ErrNested        error = command.ErrNested      // a command began in another's function or subscriber
	ErrIndefinite    error = errIndefinite          // an *IndefiniteError
	ErrNoRiver       error = fault.New("no_river", "metered: no River client was configured")
	// a statement of the function or a subscriber failed, and it returned nil, or the caller's transaction had failed before
	ErrTxFailed error = guardtx.ErrFailed
	// no JSON or UTF-8, or larger than 1 MiB. In a replay it does not fit the type: Lookup has it
	ErrResult error = fault.New("invalid_result", "metered: the result cannot be stored")
	// not by a refusal. They may have been taken. The function did not run
	ErrSticky error = fault.New("sticky_failed", "metered: the sticky charges could not be taken")
	// Command.Sticky was refused (429): also a *budget.ExceededError
	ErrTooManyAttempts = fault.ErrTooManyAttempts
	// of Client.RunTx: nobody can know whether it took effect
	ErrCommitUnknown error = fault.New("commit_unknown", "metered: the answer to COMMIT was lost")
)

var errIndefinite = fault.New("indefinite", "metered: the outcome is not known")

// IndefiniteError says that COMMIT may have taken effect, or is not known to be durable. Call again with the same command.
type IndefiniteError struct {
	Tenant, ID string

	cause error
}

func (e *IndefiniteError) Error() string {
	return fmt.Sprintf("%v: operation %q of tenant %q: %v", errIndefinite, e.ID, e.Tenant, e.cause)
}

func (e *IndefiniteError) Unwrap() []error { return []error{errIndefinite, e.cause} }

// ArgumentError says why an argument was refused, in all packages.
type ArgumentError = fault.Argument

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// misuse is invalid for a mistake of the program, whatever it was asked for.
func misuse(field, format string, args ...any) error {
	return fault.Misuse(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// Code returns the stable code of err (docs/http.md), the same in every package, or "" for nil and for errors that are not this library's.
// Most errors of a connection have none: ask Retryable.
func Code(err error) string { return fault.Code(err) }

// Retryable reports whether the same call may succeed later though nothing else is changed: a 503 over HTTP. True: ErrBusy, timeouts,
// serialization failures and deadlocks, lost or refused connections, a server that starts, shuts down or is short of something,
// replica.ErrStale and ErrIndefinite. For ErrSticky the error below it decides. Errors of other servers (*net.OpError, io.ErrUnexpectedEOF)
// count as the database's, unless the function wraps them as text.
func Retryable(err error) bool { return fault.Retryable(err) }

package metered

import (
	"fmt"
	"time"

	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/migrate"
)

// Faults of the set-up. Errors that every package has in common stand in package budget:
// budget.ErrArgument, ErrBusy, ErrSerialization, ErrNotMigrated and ErrNotGranted.
var (
	// ErrSchemaVersion says that the schema is too new, or lacks a function that this build calls.
	ErrSchemaVersion error = migrate.ErrVersion

	// ErrSchemaDiffers says that the schema is not as this build needs it. Its text has the
	// differences.
	ErrSchemaDiffers error = migrate.ErrDiffers
)

var errArgument = fault.New("invalid_argument", "metered: invalid argument")

// Answers to an operation id, beside budget.ErrConflict (another command has the id),
// budget.ErrRetired (its time is not after the purged records: it may have run) and
// budget.ErrFuture (its time is beyond Config.MaxFuture). Nothing was done.
var (
	// ErrStale says that a newer event has taken effect: see Command.Newest.
	ErrStale error = command.ErrStale

	// ErrUnknownOperation says that no operation has the id.
	ErrUnknownOperation error = fault.New("operation_unknown", "metered: no such operation")
)

// Failures of a command. Mistakes of a program have a Code and no name here: transaction_control
// and transaction_done (a function or subscriber ended the transaction, or used it after it had
// returned), transaction_failed (a statement failed and nobody said so), nested_command, no_river
// and invalid_result.
var (
	// ErrTimeout says that the server gave up at the deadline. It is also
	// context.DeadlineExceeded.
	ErrTimeout error = command.ErrTimeout

	// ErrIndefinite says that COMMIT may have taken effect. It is an *IndefiniteError.
	ErrIndefinite error = errIndefinite

	// ErrSticky says that the sticky charges may have been taken. The function did not run. It is
	// not for a refusal of them.
	ErrSticky error = fault.New("sticky_failed", "metered: the sticky charges could not be taken")

	// ErrTooManyAttempts says that Command.Sticky was refused. It is also a *budget.ExceededError.
	ErrTooManyAttempts error = fault.ErrTooManyAttempts
)

var (
	errCommitUnknown = fault.New("commit_unknown", "metered: the answer to COMMIT was lost")
	errNoRiver       = fault.New("no_river", "metered: no River client was configured")

	// errResult is a result that is no JSON or UTF-8, or over 1 MiB, or a record that does not fit
	// the type: Lookup has it.
	errResult = fault.New("invalid_result", "metered: the result cannot be stored")
)

var errIndefinite = fault.New("indefinite", "metered: the outcome is not known")

// IndefiniteError says that COMMIT may have taken effect, or not be durable.
type IndefiniteError struct {
	// Tenant and ID name the command whose outcome is not known. The same call, made again, tells
	// it.
	Tenant, ID string

	cause error
}

func (e *IndefiniteError) Error() string {
	return fmt.Sprintf("%v: operation %q of tenant %q: %v", errIndefinite, e.ID, e.Tenant, e.cause)
}

func (e *IndefiniteError) Unwrap() []error { return []error{errIndefinite, e.cause} }

// StatementError is an error of the server about one of Command.Statements.
type StatementError = command.StatementError

// Answers of sessions. Nothing was done.
var (
	// ErrRunning says that another session of the operation is open. It is a *RunningError.
	ErrRunning error = errRunning

	// ErrLost says that the hold of a session fell due or was ended, or that another session settled
	// the operation.
	ErrLost error = errLost

	// ErrFinished says that the operation is on record, and not to be done again.
	ErrFinished error = fault.New("session_finished", "metered: the operation is on record, and not to be done again")

	// ErrNotRenewed says that the hold could not be renewed. Settle works for Reservation.Grace.
	ErrNotRenewed error = errNotRenewed
)

var (
	errRunning    = fault.New("session_running", "metered: a session of the operation is open")
	errLost       = fault.New("session_lost", "metered: the session has lost its hold")
	errNotRenewed = fault.New("session_not_renewed", "metered: the session's hold could not be renewed")
)

// RunningError says that another session is open.
type RunningError struct {
	// Tenant and ID name the operation whose session is open.
	Tenant, ID string

	// Until is when the other session ends unless it is renewed. Then this one can be opened anew.
	Until time.Time

	// RetryAfter is the time until then.
	RetryAfter time.Duration
}

func (e *RunningError) Error() string {
	return fmt.Sprintf("%v: operation %q of tenant %q, for another %v unless it is renewed",
		errRunning, e.ID, e.Tenant, e.RetryAfter)
}

func (e *RunningError) Unwrap() error { return errRunning }

// lostError says that a session's hold fell due or was ended, or that another session settled the
// operation.
type lostError struct {
	// ID is the id of the session's operation.
	ID string

	// Cause is a *holds.StateError, or after a purge holds.ErrUnknown or ErrRetired.
	Cause error
}

func (e *lostError) Error() string {
	return fmt.Sprintf("%v: operation %q: %v", errLost, e.ID, e.Cause)
}

func (e *lostError) Unwrap() error { return errLost }

// renewalError says why a hold was not renewed.
type renewalError struct {
	// ID is the id of the session's operation.
	ID string

	// Due is the time until which the session can be settled.
	Due time.Time

	// Cause is the error of the last try, or holds.ErrCeiling.
	Cause error
}

func (e *renewalError) Error() string {
	return fmt.Sprintf("%v: operation %q can be settled until %s: %v", errNotRenewed, e.ID,
		e.Due.Format(time.RFC3339), e.Cause)
}

func (e *renewalError) Unwrap() error { return errNotRenewed }

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// misuse is invalid for a mistake of the program, whatever it was asked for.
func misuse(field, format string, args ...any) error {
	return fault.Misuse(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// Code returns the stable code of err (docs/http.md), the same in every package, or "" for nil and
// other errors. Most errors of a connection have none: ask Retryable.
func Code(err error) string { return fault.Code(err) }

// Retryable reports whether the same call may succeed later: a 503 over HTTP. True: budget.ErrBusy,
// timeouts, serialization failures, deadlocks, lost or refused connections, a server that starts,
// shuts down or is short of something, replica.ErrStale and ErrIndefinite. For ErrSticky the error
// below it decides. Errors of other servers (*net.OpError) count as the database's, unless the
// function wraps them as text.
func Retryable(err error) bool { return fault.Retryable(err) }

package metered

import (
	"fmt"
	"time"

	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/migrate"
)

// Faults of the set-up. Errors that every package has in common stand in package budget:
// budget.ErrArgument, ErrBusy, ErrSerialization, ErrNotMigrated and ErrNotGranted.
var (
	ErrSchemaVersion error = migrate.ErrVersion // the schema is too new, or lacks a function that this build calls
	ErrSchemaDiffers error = migrate.ErrDiffers // its text has the differences
	// ErrReadOnly says that the server is read-only: after a failover, another one is the primary.
	// The call's connection was closed. Try again.
	ErrReadOnly error = fault.ErrReadOnly
)

var errArgument = fault.New("invalid_argument", "metered: invalid argument")

// Answers to an operation id. Nothing was done.
var (
	ErrConflict         error = command.ErrConflict // another command has the id
	ErrRetired          error = command.ErrRetired  // the id's time is not after the purged records: it may have run
	ErrFuture           error = command.ErrFuture   // the id's time is beyond Config.MaxFuture
	ErrStale            error = command.ErrStale    // of Command.Newest: a newer event has taken effect
	ErrUnknownOperation error = fault.New("operation_unknown", "metered: no such operation")
)

// Failures of a command.
var (
	ErrTimeout    error = command.ErrTimeout // the server gave up at the deadline: also context.DeadlineExceeded
	ErrTxControl  error = guardtx.ErrControl // the function, a subscriber or Cost.Write tried to end the transaction
	ErrTxDone     error = guardtx.ErrDone    // the transaction was used after the function had returned
	ErrNested     error = command.ErrNested  // a command began in another's function or subscriber
	ErrIndefinite error = errIndefinite      // an *IndefiniteError
	ErrNoRiver    error = fault.New("no_river", "metered: no River client was configured")
	// a statement failed though the function or subscriber returned nil, or the caller's
	// transaction had failed before
	ErrTxFailed error = guardtx.ErrFailed
	// no JSON or UTF-8, or over 1 MiB, or a replay does not fit the type: Lookup has it
	ErrResult error = fault.New("invalid_result", "metered: the result cannot be stored")
	// not for a refusal: they may have been taken. The function did not run
	ErrSticky error = fault.New("sticky_failed", "metered: the sticky charges could not be taken")
	// Command.Sticky was refused (429): also a *budget.ExceededError
	ErrTooManyAttempts = fault.ErrTooManyAttempts
	// of Client.RunTx: it may have taken effect
	ErrCommitUnknown error = fault.New("commit_unknown", "metered: the answer to COMMIT was lost")
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
	ErrRunning error = errRunning // a *RunningError
	// ErrLost says that the hold of a session fell due or was ended, or that another session settled
	// the operation.
	ErrLost     error = errLost
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

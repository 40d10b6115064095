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
	// ErrArgument is every refused argument. The error is an *ArgumentError.
	ErrArgument error = errArgument

	// ErrSchemaVersion: the schema is too new for this build, or lacks what it calls.
	ErrSchemaVersion error = migrate.ErrVersion

	// ErrNotMigrated: the schema, or a part of it, is missing or older.
	ErrNotMigrated error = fault.ErrNotMigrated

	// ErrSchemaDiffers: the schema has this build's version, but differs. The text names the differences.
	ErrSchemaDiffers error = migrate.ErrDiffers

	// ErrNotGranted: the role has not been given what the call needs.
	ErrNotGranted error = fault.ErrNotGranted

	errArgument = fault.New("invalid_argument", "metered: invalid argument")
)

// Answers to an operation id. Nothing was done.
var (
	// ErrConflict: the id was used before, for another command.
	ErrConflict error = command.ErrConflict

	// ErrRetired: the id's time is at or before what was purged, so nobody can tell whether it ran.
	ErrRetired error = command.ErrRetired

	// ErrFuture: the id's time is ahead of the database's clock by more than Config.MaxFuture.
	ErrFuture error = command.ErrFuture

	// ErrUnknownOperation: there is no record of the id.
	ErrUnknownOperation error = fault.New("operation_unknown", "metered: no such operation")
)

// Failures of a command. The call committed nothing.
var (
	// ErrBusy: a lock was not free within the lock timeout. Try again later.
	ErrBusy error = fault.ErrBusy

	// ErrTimeout: the server gave up at the context's deadline. It is context.DeadlineExceeded too.
	ErrTimeout error = command.ErrTimeout

	// ErrTxControl: the function, a subscriber or Cost.Write tried to begin, commit or roll back.
	ErrTxControl error = guardtx.ErrControl

	// ErrTxDone: the transaction was used after the function had returned.
	ErrTxDone error = guardtx.ErrDone

	// ErrTxFailed: a statement of the function or a subscriber failed, and it returned nil all the same. In DoTx also:
	// the caller's transaction had failed before.
	ErrTxFailed error = guardtx.ErrFailed

	// ErrNested: a command was begun inside another's function or subscriber, with its context or transaction.
	ErrNested error = command.ErrNested

	// ErrNoRiver: Tx.Enqueue without Config.River.
	ErrNoRiver error = fault.New("no_river", "metered: no River client was configured")

	// ErrResult: the result cannot be written as JSON or read back, is not UTF-8, or is larger than 1 MiB. In a replay: the
	// recorded result does not fit the type; Lookup has it.
	ErrResult error = fault.New("invalid_result", "metered: the result cannot be stored")

	// ErrSticky: taking the sticky charges failed, other than by a denial. They may have been taken. The function did
	// not run.
	ErrSticky error = fault.New("sticky_failed", "metered: the sticky charges could not be taken")
)

// ErrTooManyAttempts: the budget refused Command.Sticky, and not Command.Charges: there
// were too many attempts (HTTP 429), rather than too little credit (402). The error is also a
// *budget.ExceededError and budget.ErrExceeded, whose Code it has.
var ErrTooManyAttempts = fault.ErrTooManyAttempts

// ErrIndefinite: the outcome of a COMMIT is not known. The error is an *IndefiniteError.
var ErrIndefinite error = errIndefinite

var errIndefinite = fault.New("indefinite", "metered: the outcome is not known")

// IndefiniteError says that COMMIT may or may not have taken effect, or is not known to be durable. Call again with
// the same command.
type IndefiniteError struct {
	Namespace, ID string // of the operation

	cause error
}

func (e *IndefiniteError) Error() string {
	return fmt.Sprintf("%v: operation %q in namespace %q: %v", errIndefinite, e.ID, e.Namespace, e.cause)
}

// Unwrap returns ErrIndefinite and what went wrong.
func (e *IndefiniteError) Unwrap() []error { return []error{errIndefinite, e.cause} }

// Code returns the stable code "indefinite".
func (e *IndefiniteError) Code() string { return errIndefinite.Code() }

// ArgumentError says which argument was refused, before any SQL ran, and why. It is one type for all packages.
type ArgumentError = fault.Argument

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// Code returns the stable code of err, for metrics, logs and programs on the other
// side of a wire. It is "" for nil and for errors that are not this library's.
// Errors of one code are one kind, whichever package they come from: budget.ErrBusy
// is metered.ErrBusy. Ask Retryable whether to try again, since most errors of a
// connection have no code.
//
//	refused         budget_exceeded token_invalid operation_conflict operation_retired operation_future
//	try again       busy timeout
//	not known       indefinite
//	arguments       invalid_argument
//	set-up          not_migrated not_granted schema_version schema_differs no_river job_plugin
//	the function    transaction_control transaction_done transaction_failed nested_command invalid_result
//	budget          budget_clock budget_window_purged budget_overflow budget_unknown_entry
//	                budget_entry_purged budget_not_charge budget_refund_exceeds scope_unknown scope_retired
//	tokens, jobs    token_exists job_conflict job_key_not_found
//	holds           hold_unknown hold_retired hold_conflict claim_taken hold_state hold_held hold_captured
//	                hold_released hold_expired hold_returned hold_excess hold_ceiling hold_not_returnable
//	                ttl_too_short ttl_too_long
//	operations      operation_unknown sticky_failed
//	replicas        stale_read position_unknown
func Code(err error) string { return fault.Code(err) }

// Retryable reports whether the same call may succeed later though nothing else is changed: a 503 over HTTP.
//
// True: ErrBusy; timeouts; serialization failures and deadlocks; lost or refused connections; a server that starts,
// shuts down or is short of something (SQLSTATE classes 08, 53, 57P, with exceptions); replica.ErrStale;
// ErrIndefinite, with the same command. For ErrSticky the error below it decides.
//
// False: nil; refusals, which say themselves if waiting helps; arguments, conflicts and the set-up; a cancelled call;
// and the function's own errors. A function that reads another server should wrap its *net.OpError or
// io.ErrUnexpectedEOF as text, or it counts as the database's.
func Retryable(err error) bool { return fault.Retryable(err) }

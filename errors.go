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
	// ErrArgument is the identity of every refused argument of this package. The
	// error itself is an *ArgumentError that names the argument.
	ErrArgument error = errArgument

	// ErrSchemaVersion means that the database's schema is too new for this build: by more
	// than one version, or it no longer has what this build calls.
	ErrSchemaVersion error = migrate.ErrVersion

	// ErrNotMigrated: the schema, or some of its tables or functions, are missing or of an
	// earlier version.
	ErrNotMigrated error = fault.ErrNotMigrated

	// ErrSchemaDiffers: the schema is of this build's version, but not as this build makes it.
	// The text names the differences; so does Validate.
	ErrSchemaDiffers error = migrate.ErrDiffers

	// ErrNotGranted: the role has not been given what the call needs.
	ErrNotGranted error = fault.ErrNotGranted

	errArgument = fault.New("invalid_argument", "metered: invalid argument")
)

// Answers to an operation id. Nothing was done.
var (
	// ErrConflict: the id was used before, for another command.
	ErrConflict error = command.ErrConflict

	// ErrRetired: the time that the id carries is at or before the horizon, the latest
	// one of those whose records were purged, so it cannot be told whether it ran.
	ErrRetired error = command.ErrRetired

	// ErrFuture: the time that the id carries is further ahead of the database's
	// clock than Config.MaxFuture.
	ErrFuture error = command.ErrFuture

	// ErrUnknownOperation: there is no record of the id.
	ErrUnknownOperation error = fault.New("operation_unknown", "metered: no such operation")
)

// Failures of a command. The call committed nothing.
var (
	// ErrBusy: another call with the same operation id was still running when the lock
	// timeout ran out, or another transaction still had the lock of a scope, a token or a
	// hold. Try again later (Retryable).
	ErrBusy error = fault.ErrBusy

	// ErrTimeout: the server gave up on a statement, or on a transaction that stood
	// idle, at the context's deadline. It is context.DeadlineExceeded too.
	ErrTimeout error = command.ErrTimeout

	// ErrTxControl: the function, a subscriber of its holds, or Cost.Write tried to begin,
	// commit or roll back a transaction. It should return nil or an error instead.
	ErrTxControl error = guardtx.ErrControl

	// ErrTxDone: the transaction was used after the function had returned.
	ErrTxDone error = guardtx.ErrDone

	// ErrTxFailed: a statement of the function, or of a subscriber, failed, and the function
	// or subscriber returned nil all the same. A failed transaction can only be rolled back.
	// Or, in DoTx: the caller's transaction had failed before the command began.
	ErrTxFailed error = guardtx.ErrFailed

	// ErrNested: a command was begun inside the function or a subscriber of another one: by
	// Do with its context and the same Client, or by DoTx in its transaction.
	ErrNested error = command.ErrNested

	// ErrNoRiver: Tx.Enqueue without Config.River.
	ErrNoRiver error = fault.New("no_river", "metered: no River client was configured")

	// ErrResult: the function's result cannot be written as JSON, or cannot be read back
	// into its type, or has text that is not UTF-8, or is larger than 1 MiB. Or, in a replay:
	// the result that the first call recorded cannot be read into the type that this one asks
	// for; the first call has committed (Lookup has its result).
	ErrResult error = fault.New("invalid_result", "metered: the result cannot be stored")

	// ErrSticky: taking the sticky charges failed, for another reason than a denial. They
	// may have been taken all the same; the command's function was not run.
	ErrSticky error = fault.New("sticky_failed", "metered: the sticky charges could not be taken")
)

// ErrTooManyAttempts: the budget refused Command.Sticky, and not Command.Charges: there
// were too many attempts (HTTP 429), rather than too little credit (402). The error is also a
// *budget.ExceededError and budget.ErrExceeded, whose Code it has.
var ErrTooManyAttempts = fault.ErrTooManyAttempts

// ErrIndefinite: the outcome of a COMMIT is not known. The error is an *IndefiniteError.
var ErrIndefinite error = errIndefinite

var errIndefinite = fault.New("indefinite", "metered: the outcome is not known")

// IndefiniteError says that COMMIT may or may not have taken effect. Or it has taken
// effect, but is not known to be durable: that of a command with EarlyRelease, or of the
// record that a replay found. The way out is the same command again.
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

// ArgumentError says which argument was refused, before any SQL ran: Field names it as
// the caller wrote it ("Command.ID"), Reason says what is wrong with it and what is
// allowed. It is ErrArgument, and one type for all packages.
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
//	                budget_entry_purged budget_not_charge budget_refund_exceeds
//	tokens, jobs    token_exists job_conflict job_key_not_found
//	holds           hold_unknown hold_retired hold_conflict claim_taken hold_state hold_held hold_captured
//	                hold_released hold_expired hold_returned hold_excess hold_ceiling hold_not_returnable
//	                ttl_too_short ttl_too_long
//	operations      operation_unknown sticky_failed
//	replicas        stale_read position_unknown
func Code(err error) string { return fault.Code(err) }

// Retryable reports whether the same call may succeed later though nothing else is
// changed: over HTTP a 503 with Retry-After (httplimit.Write), and for a worker a reason to try again. It
// is for the errors of this package and of budget, holds, tokens and jobs, and for those
// of pgx in a transaction of the caller's own.
//
// True: ErrBusy; timeouts, of a context's deadline and of the server; serialization
// failures and deadlocks, also once Do has given up on them; a connection that was
// refused or lost; a server that is starting, shutting down or short of something (SQLSTATE
// class 08, but 08P01 only if it is FATAL; class 53; and 57P, but for a database that was
// dropped); replica.ErrStale; and ErrIndefinite, where the call has to be the same command with the
// same ID, which is then carried out once. For ErrSticky the error below it decides; each
// new call takes the sticky charges again.
//
// False: nil; whatever was refused, where the error itself says if waiting helps
// (budget.ExceededError, holds.TakenError); arguments, conflicts and the set-up; a call
// that its caller cancelled; and the function's own errors, if they are none of those
// above. A function that reads from another server should not return a *net.OpError or
// io.ErrUnexpectedEOF as it is: it would be taken for one of the database's connection.
//
// pgconn.SafeToRetry answers another question: whether anything was sent.
func Retryable(err error) bool { return fault.Retryable(err) }

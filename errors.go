package metered

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Refused before any SQL, or by the set-up.
var (
	// ErrArgument is the identity of every refused argument of this package. The
	// error itself is an *ArgumentError that names the argument.
	ErrArgument error = errArgument

	// ErrSchemaVersion means that the database's schema is too new for this build: by more
	// than one version, or it no longer has what this build calls.
	ErrSchemaVersion error = fault.New("schema_version", "metered: the schema is too new for this build")

	// ErrNotMigrated: the schema, or some of its tables or functions, are missing or of an
	// earlier version.
	ErrNotMigrated error = fault.ErrNotMigrated

	// ErrSchemaDiffers: the schema is of this build's version, but not as this build makes it.
	// The text names the differences; so does Validate.
	ErrSchemaDiffers error = fault.New("schema_differs", "metered: the schema is not as it should be")

	// ErrNotGranted: the role has not been given what the call needs.
	ErrNotGranted error = fault.ErrNotGranted

	errArgument = fault.New("invalid_argument", "metered: invalid argument")
)

// Answers to an operation id. Nothing was done.
var (
	// ErrConflict: the id was used before, for another command.
	ErrConflict error = fault.New("operation_conflict", "metered: the operation id belongs to another command")

	// ErrRetired: the time that the id carries is at or before the horizon, the latest
	// one of those whose records were purged, so it cannot be told whether it ran.
	ErrRetired error = fault.New("operation_retired", "metered: the operation is older than what is remembered")

	// ErrFuture: the time that the id carries is further ahead of the database's
	// clock than Config.MaxFuture.
	ErrFuture error = fault.New("operation_future", "metered: the operation was issued in the future")

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
	ErrTimeout error = fault.New("timeout", "metered: timeout")

	// ErrTxControl: the function, a subscriber of its holds, or Cost.Write tried to begin,
	// commit or roll back a transaction. It should return nil or an error instead.
	ErrTxControl error = guardtx.ErrControl

	// ErrTxDone: the transaction was used after the function had returned.
	ErrTxDone error = guardtx.ErrDone

	// ErrTxFailed: a statement of the function, or of a subscriber, failed, and the function
	// or subscriber returned nil all the same. A failed transaction can only be rolled back.
	// Or, in DoTx: the caller's transaction had failed before the command began.
	ErrTxFailed error = guardtx.ErrFailed

	// errAborted is ErrTxFailed, and says whose statement it was.
	errAborted = fault.New("transaction_failed", "metered: the caller's transaction was aborted before the command began")

	// ErrNested: a command was begun inside the function or a subscriber of another one: by
	// Do with its context and the same Client, or by DoTx in its transaction.
	ErrNested error = fault.New("nested_command", "metered: a command cannot run inside another one's function")

	// ErrNoRiver: Tx.Enqueue without Config.River.
	ErrNoRiver error = fault.New("no_river", "metered: no River client was configured")

	// ErrResult: the function's result cannot be written as JSON, or cannot be read back
	// into its type, or has text that is not UTF-8, or is too large. Or, in a replay: the result that the first call
	// recorded cannot be read into the type that this one asks for; the first call has
	// committed (Lookup has its result).
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

// failed turns an error of this package's own statements into its errors. The
// Postgres error stays underneath. A refusal is no failure, and says itself of what.
func failed(doing string, err error) error {
	if fault.Refused(err) {
		return err
	}
	var kind error
	switch sqlstate.Of(err) {
	case sqlstate.Nested:
		kind = ErrNested
	case sqlstate.NotBegun, sqlstate.NotFinished, sqlstate.InvalidCursorName:
		kind = ErrTxControl
	case sqlstate.InFailedTransaction:
		kind = ErrTxFailed
	default:
		return fault.Failed("metered", doing, err)
	}
	return fmt.Errorf("%w: %s: %w", kind, doing, err)
}

// foreign wraps an error of what is not this package's own: of COMMIT, where the
// triggers run that others deferred, or of a subscriber. Its SQLSTATE is not taken for
// one of ours, but for that of the guard against a COMMIT.
func foreign(doing string, err error) error {
	if sqlstate.Of(err) == sqlstate.NotFinished {
		return fmt.Errorf("%w: %s: %w", ErrTxControl, doing, err)
	}
	return fmt.Errorf("metered: %s: %w", doing, err)
}

// timedOut gives ErrTimeout to an error that comes of ctx's deadline: ctx's own, or
// that of the timeouts which were set to end a little before it. A function may have
// deadlines of its own, which are its own errors.
func timedOut(ctx context.Context, err error) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		return err
	}
	left := time.Until(deadline)
	state := sqlstate.Of(err)
	byServer := state == sqlstate.QueryCanceled || state == sqlstate.IdleInTransaction
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return err
	case errors.Is(err, context.DeadlineExceeded) && left <= 0:
	case byServer && left <= 2*maxMargin:
	default:
		return err
	}
	return fmt.Errorf("%w: %w: %w", ErrTimeout, context.DeadlineExceeded, err)
}

// Package sqlstate names the SQLSTATEs that the library or its tests look for.
package sqlstate

import (
	"encoding/json"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Raised by the functions in schema.sql. Class MT is in the range that the SQL
// standard leaves to implementations. MT100 is caught in the function that raises it.
const (
	Exceeded      = "MT001" // a limit refused. DETAIL carries the refusal as JSON
	WindowPurged  = "MT002" // a window reaches purged entries
	ClockBehind   = "MT003" // the scope's last entry is too far ahead of the clock
	NotFinished   = "MT004" // COMMIT before a command was completed
	NotBegun      = "MT005" // completing a command in another transaction than it began in
	Nested        = "MT006" // beginning a command inside a command
	HoldRefused   = "MT007" // a hold does not allow it. DETAIL carries the answer as JSON
	RefundRefused = "MT008" // a charge cannot be refunded. DETAIL carries the reason as JSON
	LeaseClosed   = "MT009" // a lease cannot be spent from. DETAIL names it, as a refusal
	UnknownZone   = "MT010" // the server does not know the time zone in DETAIL
	Thresholds    = "MT012" // a scope has too many thresholds
	LineFull      = "MT013" // too many jobs wait for a scope. DETAIL names it
	Moved         = "MT014" // a tenant lives in another cell. DETAIL has where, as JSON
	NotCell       = "MT015" // the schema is another cell, or none
	KnownID       = "MT016" // an operation id is on record, retired or too far ahead, in a flush that goes on only with a new one
	FeedGap       = "MT017" // entries of the feed after a number are not there any more. DETAIL has the first one, as JSON
	Crossing      = "MT011" // a threshold is crossed, and the caller did not say that it tells
)

// Postgres's own, some of which the functions raise, too.
const (
	CheckViolation        = "23514"
	FeatureNotSupported   = "0A000"
	UniqueViolation       = "23505"
	NumericOutOfRange     = "22003"
	SerializationFailure  = "40001"
	DeadlockDetected      = "40P01"
	InFailedTransaction   = "25P02"
	InvalidCursorName     = "34000"
	IdleInTransaction     = "25P03" // the idle timeout ended the session
	ReadOnlyTransaction   = "25006"
	ObjectInUse           = "55006" // a database with sessions
	LockNotAvailable      = "55P03"
	QueryCanceled         = "57014"
	UndefinedTable        = "42P01"
	UndefinedFunction     = "42883"
	InvalidParameter      = "22023"
	UndefinedColumn       = "42703"
	UndefinedObject       = "42704" // a type, say
	InvalidSchemaName     = "3F000"
	InsufficientPrivilege = "42501"
	DiskFull              = "53100"
	OutOfMemory           = "53200" // of the lock table, too
	ProtocolViolation     = "08P01"
	AdminShutdown         = "57P01"
	CrashShutdown         = "57P02"
	CannotConnectNow      = "57P03" // starting, or shutting down
	IdleSession           = "57P05"
	TransactionTimeout    = "25P04"

	StatementCompletionUnknown = "40003"
)

// Classes of Postgres.
const (
	ConnectionException   = "08"
	InsufficientResources = "53" // connections, memory, disk
	OperatorIntervention  = "57"
	SystemError           = "58"
	InternalError         = "XX"
)

// Class is the class of a SQLSTATE, its first two characters.
func Class(state string) string { return state[:min(2, len(state))] }

// Of returns the SQLSTATE of the Postgres error in err's chain, or "". Citus passes some collisions
// of a worker on as an internal error. The error of a prepared statement whose table was changed
// since ("cached plan must not change result type") stands for a collision with that change: pgx
// prepares the statement anew after it.
func Of(err error) string {
	if err == nil {
		return ""
	}
	var pgErr *pgconn.PgError // from here on, since it is allocated here
	switch {
	case !errors.As(err, &pgErr):
		return ""
	case Class(pgErr.Code) == InternalError && strings.HasPrefix(pgErr.Message, "could not serialize access"):
		return SerializationFailure
	case pgErr.Code == FeatureNotSupported && pgErr.Routine == "RevalidateCachedQuery":
		return SerializationFailure
	}
	return pgErr.Code
}

// OfShard reports whether err is that of Citus where a worker did not answer COMMIT by its tag. The
// worker died, or above READ COMMITTED it found a collision.
func OfShard(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && Class(pgErr.Code) == InternalError && strings.HasPrefix(pgErr.Message, "could not commit transaction for shard")
}

// Collided reports whether the whole transaction may succeed if it runs again at once.
func Collided(err error) bool {
	state := Of(err)
	return state == SerializationFailure || state == DeadlockDetected || state == LeaseClosed
}

// Behind is the scope in which more is due than one call writes, or "".
func Behind(err error) string {
	var pgErr *pgconn.PgError
	var detail struct{ Behind string }
	if !errors.As(err, &pgErr) || pgErr.Code != LockNotAvailable || json.Unmarshal([]byte(pgErr.Detail), &detail) != nil {
		return ""
	}
	return detail.Behind
}

// Missing reports whether err says that the schema lacks something, as an older one does. Its
// functions refuse arguments that are out of bounds, which the library sends only to functions of a
// later version.
func Missing(err error) bool {
	switch Of(err) {
	case UndefinedTable, UndefinedFunction, InvalidSchemaName, UndefinedColumn, UndefinedObject:
		return true
	case InvalidParameter:
		var pgErr *pgconn.PgError
		return errors.As(err, &pgErr) && strings.HasPrefix(pgErr.Message, "out of bounds: ")
	}
	return false
}

// OfBudget reports whether package budget has an error for a SQLSTATE of a charge, refusals aside.
func OfBudget(state string) bool {
	switch state {
	case WindowPurged, ClockBehind, NumericOutOfRange, UnknownZone, Thresholds:
		return true
	}
	return false
}

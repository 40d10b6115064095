package fault

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/sqlstate"
)

// Refused reports whether a budget, a token or a hold said no.
func Refused(err error) bool {
	return slices.ContainsFunc([]string{
		"budget_exceeded", "budget_refund_exceeds", "scope_unknown", "scope_retired", "scope_closed", "token_invalid",
		"claim_taken", "hold_state", "hold_unknown", "hold_excess", "hold_ceiling", "hold_not_returnable",
		"operation_stale",
	}, func(code string) bool { return Is(err, code) })
}

// Lost is the error of a command whose connection was lost before COMMIT was sent.
type Lost struct{ Err error }

func (e *Lost) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Lost) Unwrap() error { return e.Err }

// Retryable is metered.Retryable, for packages that do not import it.
func Retryable(err error) bool {
	switch {
	case Is(err, "indefinite"):
		return true
	case err == nil, Refused(err), Is(err, "commit_unknown"), errors.Is(err, context.Canceled):
		return false
	case Is(err, "busy"), Is(err, "serialization"), Is(err, "stale_read"), Is(err, "tenant_moved"), Is(err, "read_only"), errors.Is(err, context.DeadlineExceeded): // the code timeout is that, too
		return true
	}
	var answer *pgconn.PgError
	if errors.As(err, &answer) { // also below a *pgconn.ConnectError: a wrong password stays wrong
		return passing(answer)
	}
	var connect *pgconn.ConnectError
	var network *net.OpError
	var lost *Lost
	return errors.As(err, &connect) || errors.As(err, &network) || errors.As(err, &lost) ||
		errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, io.ErrUnexpectedEOF)
}

// passing reports whether the server's error may pass.
func passing(answer *pgconn.PgError) bool {
	switch sqlstate.Of(answer) {
	case sqlstate.SerializationFailure, sqlstate.DeadlockDetected, sqlstate.LockNotAvailable, sqlstate.QueryCanceled,
		sqlstate.IdleInTransaction, sqlstate.TransactionTimeout, sqlstate.AdminShutdown, sqlstate.CrashShutdown,
		sqlstate.CannotConnectNow, sqlstate.IdleSession, sqlstate.ReadOnlyTransaction:
		return true
	case sqlstate.ProtocolViolation: // as a FATAL, PgBouncer's after it lost a server. As an ERROR it is the program's
		return answer.SeverityUnlocalized == "FATAL"
	}
	return sqlstate.Class(answer.Code) == sqlstate.ConnectionException || sqlstate.Class(answer.Code) == sqlstate.InsufficientResources
}

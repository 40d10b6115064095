// Package commit says whether a COMMIT took effect.
package commit

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/sqlstate"
)

// Outcome is the outcome of a transaction. The zero value is Unknown.
type Outcome int

const (
	Unknown      Outcome = iota // it may be committed, now or later
	Committed                   // COMMIT's own tag was read
	NotCommitted                // it never will be
)

// Of judges the outcome of a transaction when err answered its COMMIT, or its one statement. tag is
// COMMIT's, or "" if none was read. With "" and no error, the caller has seen COMMIT succeed. conn
// is nil if the caller has none.
//
//	answer                                       outcome
//	COMMIT's tag                                 Committed
//	ROLLBACK's tag, or pgx.ErrTxCommitRollback   NotCommitted
//	ERROR, then ReadyForQuery                    NotCommitted, unless Doubtful
//	ctx was done before anything was sent        NotCommitted
//	all else                                     Unknown
//
// FATAL is Unknown: PgBouncer answers FATAL 08P01 whether COMMIT went through or not. A connection
// that is lost while COMMIT waits is Unknown, though pgconn.SafeToRetry is true of it. So is a
// context that ends then, for which pgx returns the bare error of the context. pgx returns an ERROR
// of COMMIT alone only after ReadyForQuery, and else the error of the connection, so that conn adds
// nothing there.
func Of(conn *pgconn.PgConn, tag string, err error) Outcome {
	var answer *pgconn.PgError
	switch {
	case tag == "COMMIT", tag == "" && err == nil:
		return Committed
	case tag == "ROLLBACK", errors.Is(err, pgx.ErrTxCommitRollback), notSent(err):
		return NotCommitted
	case tag != "" || conn != nil && (conn.IsClosed() || conn.IsBusy()):
		return Unknown
	case errors.As(err, &answer) && answer.SeverityUnlocalized == "ERROR" && !Doubtful(sqlstate.Of(answer)):
		return NotCommitted
	}
	return Unknown
}

// Doubtful reports whether an ERROR of the SQLSTATE may come from a pooler that lost its server.
// Such a pooler does not know the outcome of COMMIT.
func Doubtful(state string) bool {
	switch sqlstate.Class(state) {
	case sqlstate.ConnectionException, sqlstate.SystemError, sqlstate.InternalError, "":
		return true
	case sqlstate.OperatorIntervention:
		return state != sqlstate.QueryCanceled // a server that cancels COMMIT rolls back
	}
	return state == sqlstate.StatementCompletionUnknown
}

// notSent reports whether pgx found the context to be done before it wrote anything: it marks that
// error as a timeout that is safe to retry. One of a connection that was lost is safe to retry by
// its word, too, but is no timeout.
func notSent(err error) bool {
	done := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	return done && pgconn.Timeout(err) && pgconn.SafeToRetry(err)
}

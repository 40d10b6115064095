package metered

import "github.com/pgmetered/metered/internal/fault"

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

package command

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// ErrConflict, ErrRetired and ErrFuture are those of package budget, and ErrTimeout and ErrStale those
// of package metered. The others have their codes alone.
var (
	ErrConflict = fault.New("operation_conflict", "metered: the operation id belongs to another command")
	ErrRetired  = fault.New("operation_retired", "metered: the operation is older than the retained records")
	ErrFuture   = fault.New("operation_future", "metered: the operation was issued in the future")
	ErrTimeout  = fault.New("timeout", "metered: timeout")
	ErrStale    = fault.New("operation_stale", "metered: a newer event has taken effect")
	ErrNested   = fault.New("nested_command", "metered: a command cannot run inside another one's function")
	ErrAborted  = fault.New("transaction_failed", "metered: the caller's transaction was aborted before the command began")
)

// ErrPanics is the error that an observer gets for a function that panics.
var ErrPanics = errors.New("metered: the function panics")

// failed turns an error of the engine's own statements into those of package metered. The
// Postgres error stays underneath. A refusal is no failure, and names its cause itself.
func failed(doing string, err error) error {
	if fault.Refused(err) {
		return err
	}
	var kind error
	switch sqlstate.Of(err) {
	case sqlstate.Nested:
		kind = ErrNested
	case sqlstate.NotBegun, sqlstate.NotFinished, sqlstate.InvalidCursorName:
		kind = guardtx.ErrControl
	case sqlstate.InFailedTransaction:
		kind = guardtx.ErrFailed
	default:
		return fault.Failed("metered", doing, err)
	}
	return fmt.Errorf("%w: %s: %w", kind, doing, err)
}

// foreign wraps an error from outside the engine: of COMMIT, where the triggers run that others
// deferred, or of a subscriber. Its SQLSTATE is not taken for one of ours, but for that of the
// guard against a COMMIT.
func foreign(doing string, err error) error {
	if sqlstate.Of(err) == sqlstate.NotFinished {
		return fmt.Errorf("%w: %s: %w", guardtx.ErrControl, doing, err)
	}
	return fmt.Errorf("metered: %s: %w", doing, err)
}

// ofCharges turns SQLSTATEs raised by charges into their errors, a refusal (MT001) into
// *budget.ExceededError.
func ofCharges(c *ledger.Charging, err error) error {
	if fault.Code(err) != "" {
		return err // it has them
	}
	switch state := sqlstate.Of(err); {
	case state == sqlstate.Exceeded || sqlstate.OfBudget(state):
		if c != nil {
			return c.Failed(err)
		}
	case state == sqlstate.LeaseClosed:
		if closed := (*ledger.ClosedError)(nil); c != nil && c.Closed != nil && errors.As(c.Failed(err), &closed) {
			c.Closed(closed.Lease)
		}
	}
	return err
}

// gaveUp is the error of the last attempt that collided.
func gaveUp(n int, err error) error {
	return fmt.Errorf("%w: gave up after %d attempts (Config.MaxAttempts); at a hot scope use READ COMMITTED, which is as exact, or allow more: %w",
		fault.ErrSerialization, n, err)
}

// timedOut gives ErrTimeout to an error that comes of ctx's deadline: ctx's own, or
// that of the timeouts which were set to end a little before it. A function may have
// deadlines of its own, which are its own errors. An error that comes of ctx's end has
// the cause that ctx's owner gave.
func timedOut(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, ctx.Err()) && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
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
		return fmt.Errorf("%w: %w", ErrTimeout, err)
	case byServer && left <= 2*maxMargin:
		return fmt.Errorf("%w: %w: %w", ErrTimeout, context.DeadlineExceeded, err)
	}
	return err
}

package ledger

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/savepoint"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// ErrCrossing is the error of a call that would cross a threshold, and was not sent with Telling.
// It did nothing.
var ErrCrossing = errors.New("a threshold is crossed")

// Crossing reports whether err is ErrCrossing, or the same as an error of Postgres.
func Crossing(err error) bool {
	return errors.Is(err, ErrCrossing) || sqlstate.Of(err) == sqlstate.Crossing
}

// Silently makes a call that reports no thresholds. Where it would cross one it did nothing, and is
// made again, as one that reports them before its transaction commits.
func Silently(call func(telling bool) error) error {
	err := call(false)
	if Crossing(err) {
		err = call(true)
	}
	return err
}

// SilentlyIn is Silently in a caller's transaction. The call that reports runs in a savepoint: an
// error of a subscriber takes the call back, and leaves the transaction usable. pkg begins the
// errors of the savepoint.
func SilentlyIn[R any](ctx context.Context, tx pgx.Tx, pkg string, call func(tx pgx.Tx, telling bool) (R, error)) (r R, err error) {
	err = Silently(func(telling bool) (err error) {
		if telling {
			r, err = savepoint.In(ctx, tx, pkg, func(sub pgx.Tx) (R, error) { return call(sub, true) })
		} else {
			r, err = call(tx, false)
		}
		return err
	})
	return r, err
}

// Package savepoint runs a function in a caller's transaction, and undoes its writes if it fails.
package savepoint

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// undoTimeout is how long a rollback may go on once its caller's context has ended.
const undoTimeout = 5 * time.Second

// Undoing is a context for the rollback to a savepoint of a transaction that is ctx's owner's: it
// lasts as long as ctx, and then for 5 seconds. One that ends during the rollback closes the
// connection, and the owner's transaction with it. Under ctx itself nothing would be sent once it has
// ended.
func Undoing(ctx context.Context) (context.Context, context.CancelFunc) {
	undoing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(undoTimeout, cancel) })
	return undoing, func() {
		stop()
		cancel()
	}
}

// In runs fn in a savepoint of tx. Its error, its panic and the end of ctx meanwhile undo its
// writes, and leave tx as usable as it was. If fn ended the savepoint or left the connection in
// use, it closes the connection: the caller must not commit writes of a failed fn.
func In[T any](ctx context.Context, tx pgx.Tx, pkg string, fn func(pgx.Tx) (T, error)) (result T, err error) {
	sub, err := tx.Begin(ctx)
	if err != nil {
		return result, fmt.Errorf("%s: savepoint: %w", pkg, err)
	}
	done := false
	defer func() {
		if done {
			return
		}
		ctx, cancel := Undoing(ctx)
		defer cancel()
		if sub.Rollback(ctx) == nil {
			return
		}
		if conn := sub.Conn(); conn != nil {
			_ = conn.Close(ctx)
		}
	}()
	if result, err = fn(sub); err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return result, err
	}
	if err := sub.Commit(ctx); err != nil {
		return result, fmt.Errorf("%s: savepoint: %w", pkg, err)
	}
	done = true
	return result, nil
}

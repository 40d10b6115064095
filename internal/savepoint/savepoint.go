// Package savepoint runs a function in a caller's transaction, and undoes its writes if it fails.
package savepoint

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// undoTimeout bounds the rollback after fn's context has ended.
const undoTimeout = 5 * time.Second

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
		// With a context of its own: under one that has ended nothing is sent.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
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

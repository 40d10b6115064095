package metered

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// stick takes the sticky charges of op in a transaction of its own, on a second
// connection, while the first one holds the claim: so it is certain that this call
// is no replay, and a concurrent repetition waits until there is something to
// replay. The caller holds a place in c.sticky, which leaves a connection for this.
func (c *Client) stick(ctx context.Context, op *operation) error {
	var denied error
	err := pgx.BeginFunc(ctx, c.pool, func(tx pgx.Tx) error {
		_, denied = op.sticky.Scan(tx.QueryRow(ctx, op.sticky.SQL(), op.sticky.Args()...))
		return denied
	})
	switch {
	case errors.Is(denied, errExceeded):
		return denied
	case err != nil:
		return fmt.Errorf("%w: %w", ErrSticky, err)
	}
	op.stuck = true
	return nil
}

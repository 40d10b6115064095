package metered

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"weak"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// places has a channel for each pool, with one place less than the pool has connections:
// so many attempts of commands with sticky charges may run at once, and one connection is
// left for their charges. It belongs to the pool and not to a Client, since two clients of
// one pool could otherwise wait for each other's connections.
var places sync.Map // of weak.Pointer[pgxpool.Pool]

func stickyPlaces(pool *pgxpool.Pool) chan struct{} {
	key := weak.Make(pool)
	fresh := make(chan struct{}, max(0, pool.Config().MaxConns-1))
	if there, loaded := places.LoadOrStore(key, fresh); loaded {
		return there.(chan struct{})
	}
	runtime.AddCleanup(pool, func(key weak.Pointer[pgxpool.Pool]) { places.Delete(key) }, key)
	return fresh
}

// takeSticky takes the sticky charges of op in a transaction of its own, on a second
// connection, while the first one holds the claim: so it is certain that this call
// is no replay, and a concurrent repetition waits until there is something to
// replay. The caller holds a place in c.sticky, which leaves a connection for this.
func (c *Client) takeSticky(ctx context.Context, op *operation) error {
	var receipt budget.Receipt
	var denied error
	err := pgx.BeginFunc(ctx, c.pool, func(tx pgx.Tx) error {
		receipt, denied = c.Budget.Charge(ctx, tx, op.command.Sticky...)
		return denied
	})
	switch {
	case errors.Is(denied, budget.ErrExceeded):
		return fmt.Errorf("%w: %w", ErrTooManyAttempts, denied)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrSticky, err)
	}
	op.stickyTaken, op.stickyReceipt = true, receipt
	return nil
}

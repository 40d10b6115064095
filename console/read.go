package console

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// beginSQL lets nothing be written, and nothing take long: neither a statement, nor a wait for a
// lock. The planner takes rows that a statement may read for those that it will, and would compile
// it (jit): half a second for 10 ms of work.
const beginSQL = `begin isolation level repeatable read, read only;
set local statement_timeout = %[1]d; set local lock_timeout = %[1]d; set local jit = off; set local idle_in_transaction_session_timeout = %[1]d`

// errCrowded: all connections that the page may use are in use.
var errCrowded = errors.New("console: too many reads at once")

// read calls fn with a transaction that cannot write. All its reads are of one moment.
//
// The end of a request does not end its reads. If it did, pgx would close the connection: each
// browser that goes on to the next page would cost the pool one. The server ends them, after
// Config.Timeout a statement.
func (h *Handler) read(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	waiting := time.NewTimer(h.cfg.Timeout)
	defer waiting.Stop()
	select {
	case h.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-waiting.C:
		return errCrowded
	}
	defer func() { <-h.slots }()
	const statements = 3 // the most time that a page may take, in timeouts
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statements*h.cfg.Timeout)
	defer cancel()
	return pgx.BeginTxFunc(ctx, h.pool, pgx.TxOptions{BeginQuery: h.begin},
		func(tx pgx.Tx) error { return fn(ctx, tx) })
}

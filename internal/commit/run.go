package commit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/guardtx"
)

// undoTimeout bounds a rollback, which must also work when the context is done.
const undoTimeout = 5 * time.Second

// Run calls fn in tx and commits it, or rolls it back if fn fails or panics, or if ctx is done by
// then. The errors of fn and of ctx are returned as they are, and those of COMMIT as by Failed.
func Run(ctx context.Context, tx pgx.Tx, pkg string, unknown error, fn func(pgx.Tx) error) error {
	defer func() { // after COMMIT it does nothing
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		_ = tx.Rollback(ctx)
	}()
	if err := fn(tx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err // else nobody could know whether COMMIT was sent
	}
	if err := tx.Commit(ctx); err != nil {
		return Failed(tx.Conn().PgConn(), pkg, unknown, err)
	}
	return Durable(ctx, unknown)
}

// Durable is nil, or unknown where ctx has ended by the time that COMMIT, sent before, was answered
// by its tag. pgx may have sent a cancel request then, by which the server gives up waiting for a
// synchronous standby, and answers so.
func Durable(ctx context.Context, unknown error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: committed, but not known to be on a standby: %w", unknown, err)
	}
	return nil
}

// Failed is err, of COMMIT in package pkg, as callers get it: unknown, unless Of says that it is
// not committed.
func Failed(conn *pgconn.PgConn, pkg string, unknown, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return fmt.Errorf("%w: %w", guardtx.ErrFailed, err)
	case errors.Is(err, pgx.ErrTxClosed):
		return fmt.Errorf("%w: %w", guardtx.ErrControl, err)
	case Of(conn, "", err) == NotCommitted:
		return fmt.Errorf("%s: commit: %w", pkg, err)
	}
	return fmt.Errorf("%w: %w", unknown, err)
}

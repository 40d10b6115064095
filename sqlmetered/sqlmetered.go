// Package sqlmetered runs metered commands inside a *sql.Tx of pgx's stdlib driver, best from OpenDB
// with the Client's pool. Your writes by the *sql.Tx and the command commit together, or neither
// does.
//
// Most programs want DoTx and Commit. InTx is for calls of budget, holds and so on. Beside the
// rules of metered.DoTx:
//
//   - A function uses only its own tx: a call of the *sql.Tx in it never returns. Calls of other goroutines, and the
//     rollback when BeginTx's context is done, wait for it.
//   - In a replay (Outcome.Replayed) the *sql.Tx has your writes a second time: roll back, or make them in the function.
//   - Large objects cannot be used. A *sql.Tx of another driver (lib/pq) is a *budget.ArgumentError. A driver that
//     wraps pgx's must pass arguments on unchanged.
package sqlmetered

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
)

var errArgument = fault.New("invalid_argument", "sqlmetered: invalid argument")

func notPgx() error {
	return fault.Invalid(errArgument, "tx", "is not a transaction of pgx's stdlib driver")
}

// DoTx is metered.DoTx inside tx. Errors: those of metered.DoTx and InTx.
func DoTx[R any](ctx context.Context, c *metered.Client, tx *sql.Tx, cmd metered.Command,
	fn metered.Func[R]) (metered.Outcome[R], error) {
	return inTx(ctx, tx, func(ctx context.Context, tx pgx.Tx) (metered.Outcome[R], error) {
		return metered.DoTx(ctx, c, tx, cmd, fn)
	})
}

// OpenTx is metered.OpenTx inside tx. Errors: those of metered.OpenTx and InTx.
func OpenTx[R any](ctx context.Context, c *metered.Client, tx *sql.Tx,
	r metered.Reservation) (*metered.Session[R], error) {
	s, err := inTx(ctx, tx, func(_ context.Context, tx pgx.Tx) (*metered.Session[R], error) {
		return metered.OpenTx[R](ctx, c, tx, r) // the session's context outlives the call
	})
	if err != nil && s != nil {
		s.Close()
		s = nil
	}
	return s, err
}

// SettleTx is Session.SettleTx inside tx. Errors: those of Session.SettleTx and InTx.
func SettleTx[R any](ctx context.Context, s *metered.Session[R], tx *sql.Tx, used metered.Cost,
	fn metered.Func[R]) (metered.Outcome[R], error) {
	if err := fault.NotNil(errArgument, "s", s); err != nil {
		return metered.Outcome[R]{}, err
	}
	return inTx(ctx, tx, func(ctx context.Context, tx pgx.Tx) (metered.Outcome[R], error) {
		return s.SettleTx(ctx, tx, used, fn)
	})
}

// inTx is InTx of a function with an answer, which is zero if the function was not called, or its
// transaction has failed.
func inTx[A any](ctx context.Context, tx *sql.Tx,
	fn func(ctx context.Context, tx pgx.Tx) (A, error)) (A, error) {
	var answer A
	var done error
	err := InTx(ctx, tx, func(ctx context.Context, tx pgx.Tx) error {
		answer, done = fn(ctx, tx)
		return done
	})
	if err != nil && done == nil {
		var none A
		return none, err
	}
	return answer, err
}

// InTx calls fn once with tx as a pgx.Tx, which is dead when fn returns. fn cannot end the
// transaction: it gets the code transaction_control. InTx sets no savepoint: after an error the
// rollback of tx undoes fn's writes. A panic in fn leaves tx open.
//
// Errors before fn is called: *budget.ArgumentError, sql.ErrTxDone, ctx's. After it: those of fn,
// and the code transaction_failed if fn returns nil though a statement failed or rows are open. It
// costs a round trip only if the connection has a pgx tracer.
func InTx(ctx context.Context, tx *sql.Tx, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if err := cmp.Or(fault.NotNil(errArgument, "tx", tx), fault.NotNil(errArgument, "fn", fn)); err != nil {
		return err
	}
	c := &call{fn: fn}
	_, err := tx.ExecContext(ctx, marker, c)
	switch {
	case c.err != nil:
		return c.err
	case c.called && errors.Is(err, errReturned):
		return nil
	case c.foreign, !c.called && err == nil: // a driver that asks for no value has made something else of it
		return notPgx()
	}
	return err
}

// Commit commits tx. On budget.ErrCommitUnknown the answer was lost, or BeginTx's context ended
// before it came: run the transaction again with the same command, which is a replay if it was
// committed. On sql.ErrTxDone tx had ended before, either way. Any other error means not committed:
// the code transaction_failed after a failed statement, the context's error, or an error of Postgres
// (metered.Retryable).
//
// A request's context ends when its client leaves. Begin with context.WithoutCancel(r.Context()),
// and a timeout, to learn the outcome.
func Commit(tx *sql.Tx) error {
	if err := fault.NotNil(errArgument, "tx", tx); err != nil {
		return err
	}
	err := tx.Commit()
	switch {
	case err == nil, errors.Is(err, sql.ErrTxDone):
		return err
	case (err == context.Canceled || err == context.DeadlineExceeded) &&
		!errors.Is(tx.Rollback(), sql.ErrTxDone):
		return err // database/sql found the context of BeginTx done, and left the transaction open: COMMIT was not sent
	}
	return commit.Failed(nil, "sqlmetered", budget.ErrCommitUnknown, err)
}

// marker is the statement that a tracer shows. Sent to a server, it does nothing.
const marker = "-- sqlmetered"

// errReturned stops pgx from sending marker.
var errReturned = errors.New("sqlmetered: the function has returned")

// call is the argument of a statement. pgx lets an argument rewrite its statement, and hands it the
// connection for that. database/sql has locked it meanwhile, so that nobody else uses it, ends the
// transaction, or gives it away.
type call struct {
	fn      func(context.Context, pgx.Tx) error
	called  bool
	err     error
	foreign bool // a driver asked for a value
}

// RewriteQuery makes call a pgx.QueryRewriter.
func (c *call) RewriteQuery(ctx context.Context, conn *pgx.Conn, _ string, _ []any) (string, []any, error) {
	c.called = true
	if c.err = c.run(ctx, conn); c.err != nil {
		return "", nil, c.err
	}
	if conn.Config().Tracer == nil {
		return "", nil, errReturned
	}
	return marker, nil, nil
}

func (c *call) run(ctx context.Context, conn *pgx.Conn) error {
	if conn.PgConn().TxStatus() == 'I' {
		return fmt.Errorf("%w: one of its statements ended it", sql.ErrTxDone)
	}
	done := new(atomic.Bool)
	defer done.Store(true)
	if err := c.fn(ctx, guardtx.New(&transaction{pgxConn: conn}, done)); err != nil {
		return err
	}
	return guardtx.Intact(ctx, conn.PgConn())
}

// Value makes call a driver.Valuer, which drivers other than pgx's ask for a value.
func (c *call) Value() (driver.Value, error) {
	c.foreign = true
	return nil, notPgx()
}

// Package guardtx makes of a pgx.Tx one that its user cannot end, and that is dead once its lender
// says so.
package guardtx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pause"
)

// Refusals of a Tx. Package metered has them under names of its own.
var (
	ErrControl = fault.New("transaction_control", "metered: the command's function must not end its transaction")
	ErrFailed  = fault.New("transaction_failed", "metered: a statement of the command's function failed")
	ErrDone    = fault.New("transaction_done", "metered: the command's transaction is over")
)

// Tx is a transaction that its user cannot end. The zero value is over.
type Tx struct{ guarded }

// New lends bare until done is set.
func New(bare pgx.Tx, done *atomic.Bool) Tx { return Tx{guarded{bareTx: bare, done: done}} }

// Commit is ErrControl.
func (Tx) Commit(context.Context) error { return ErrControl }

// Rollback is ErrControl.
func (Tx) Rollback(context.Context) error { return ErrControl }

// Intact is an error if nothing more can be sent in the transaction of pg, or committed.
func Intact(ctx context.Context, pg *pgconn.PgConn) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("metered: before the commit: %w", pause.Ended(ctx))
	case pg.IsClosed():
		return errors.New("metered: the connection was lost before the commit")
	case pg.IsBusy():
		return fmt.Errorf("%w: it left rows or a batch open", ErrFailed)
	case pg.TxStatus() == 'I':
		return fmt.Errorf("%w: it has ended", ErrControl)
	case pg.TxStatus() == 'E':
		return ErrFailed
	}
	return nil
}

// guarded refuses to end the transaction that it belongs to. Commit and Rollback are those of Tx,
// or of a savepoint.
type guarded struct {
	bareTx
	done *atomic.Bool
}

// bareTx is embedded under a name that is not exported: nobody is to reach around.
type bareTx = pgx.Tx

// check refuses a statement before it is sent.
func (g guarded) check(sql string) error {
	if err := g.alive(); err != nil {
		return err
	}
	return readable(g.bareTx.Conn(), sql)
}

// readable refuses a text that would end a transaction.
func readable(conn *pgx.Conn, sql string) error {
	backslashes := conn != nil && conn.PgConn().ParameterStatus("standard_conforming_strings") == "off"
	if controlsTransaction(sql, backslashes) {
		return fmt.Errorf("%w: one of its statements would, or a quote or a comment is left open", ErrControl)
	}
	return nil
}

// Checked is a query for a batch of conn that begins and ends a transaction, unless the query would
// end it. The text that a rewriter makes of it is checked before the batch is sent. The server does
// not guard this transaction, so the text is a statement, and none that was prepared under a name.
func Checked(conn *pgx.Conn, q *pgx.QueuedQuery) (*pgx.QueuedQuery, error) {
	check := func(sql string) error {
		if !IsStatement(sql) {
			return fmt.Errorf("%w: %q may be the name of a statement that would", ErrControl, sql)
		}
		return readable(conn, sql)
	}
	if err := readable(conn, q.SQL); err != nil {
		return nil, err
	}
	return &pgx.QueuedQuery{SQL: q.SQL, Arguments: options(q.Arguments, check)}, nil
}

// Several reports whether a text holds more than one statement.
func Several(sql string) bool {
	_, rest, _ := statement(sql, false)
	return strings.TrimSpace(rest) != ""
}

// IsStatement reports whether a text is one of the usual statements, by its first word. Another one
// may be the name of a prepared statement, and that one a COMMIT.
func IsStatement(sql string) bool {
	words, _, _ := statement(sql, false)
	switch words[0] {
	case "select", "insert", "update", "delete", "merge", "with", "values", "call", "do", "set", "lock", "notify", "truncate", "create":
		return true
	}
	return false
}

// options wraps the rewriters among pgx's options, which come before the arguments, so that the
// rewritten statement is checked too.
func (g guarded) options(args []any) []any { return options(args, g.check) }

func options(args []any, check func(sql string) error) []any {
	for i, arg := range args {
		switch arg := arg.(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
			continue
		case pgx.QueryRewriter:
			args = slices.Clone(args)
			args[i] = rewriter{arg, check}
			continue
		}
		break
	}
	return args
}

type rewriter struct {
	pgx.QueryRewriter
	check func(sql string) error
}

func (r rewriter) RewriteQuery(ctx context.Context, conn *pgx.Conn, sql string, args []any) (string, []any, error) {
	sql, args, err := r.QueryRewriter.RewriteQuery(ctx, conn, sql, args)
	if err == nil {
		err = r.check(sql)
	}
	return sql, args, err
}

// over reports whether the function has returned. The zero value was never begun.
func (g guarded) over() bool { return g.done == nil || g.done.Load() }

func (g guarded) alive() error {
	if g.over() {
		return ErrDone
	}
	if conn := g.bareTx.Conn(); conn != nil && conn.PgConn().TxStatus() == 'I' {
		// It has ended unseen: the next statement would be committed on its own.
		return fmt.Errorf("%w: it has ended", ErrControl)
	}
	return nil
}

// Begin sets a savepoint, as pgx does.
func (g guarded) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := g.alive(); err != nil {
		return nil, err
	}
	tx, err := g.bareTx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return savepoint{guarded{bareTx: tx, done: g.done}}, nil
}

// savepoint is a nested transaction of the function's, which it may end.
type savepoint struct{ guarded }

func (s savepoint) Commit(ctx context.Context) error {
	if err := s.alive(); err != nil {
		return err
	}
	return s.bareTx.Commit(ctx)
}

func (s savepoint) Rollback(ctx context.Context) error {
	if err := s.alive(); err != nil {
		return err
	}
	return s.bareTx.Rollback(ctx)
}

func (g guarded) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := g.check(sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	return g.bareTx.Exec(ctx, sql, g.options(args)...)
}

func (g guarded) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := g.check(sql); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	}
	return g.bareTx.Query(ctx, sql, g.options(args)...)
}

func (g guarded) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := g.check(sql); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).QueryRow()
	}
	return g.bareTx.QueryRow(ctx, sql, g.options(args)...)
}

func (g guarded) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	for _, q := range b.QueuedQueries {
		if err := g.check(q.SQL); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
		q.Arguments = g.options(q.Arguments)
	}
	return g.bareTx.SendBatch(ctx, b)
}

func (g guarded) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := g.check(sql); err != nil {
		return nil, err
	}
	return g.bareTx.Prepare(ctx, name, sql)
}

func (g guarded) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if err := g.alive(); err != nil {
		return 0, err
	}
	return g.bareTx.CopyFrom(ctx, table, columns, src)
}

// LargeObjects are those of a closed transaction once this one is over.
func (g guarded) LargeObjects() pgx.LargeObjects {
	if err := g.alive(); err != nil {
		b := &pgx.Batch{}
		b.BeginTx(pgx.TxOptions{})
		return pgx.FailedBatchResults(b, err).Tx().LargeObjects()
	}
	return g.bareTx.LargeObjects()
}

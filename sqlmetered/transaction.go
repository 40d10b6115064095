package sqlmetered

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/guardtx"
)

// transaction is the one that a connection is in. pgx has no pgx.Tx of a transaction that it did
// not begin.
type transaction struct {
	*pgxConn
	savepoints int // so many were set
}

// pgxConn is embedded under a name that is not that of a method.
type pgxConn = pgx.Conn

func (t *transaction) Conn() *pgx.Conn { return t.pgxConn }

// Commit and Rollback are the *sql.Tx's.
func (t *transaction) Commit(context.Context) error   { return guardtx.ErrControl }
func (t *transaction) Rollback(context.Context) error { return guardtx.ErrControl }

// LargeObjects are those of a closed transaction: pgx makes them of its own transactions only.
func (t *transaction) LargeObjects() pgx.LargeObjects {
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(b, pgx.ErrTxClosed).Tx().LargeObjects()
}

// Begin sets a savepoint.
func (t *transaction) Begin(ctx context.Context) (pgx.Tx, error) {
	t.savepoints++
	s := &savepoint{transaction: t, name: fmt.Sprintf("sqlmetered_%d", t.savepoints)}
	if _, err := t.Exec(ctx, "savepoint "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

type savepoint struct {
	*transaction
	name   string
	closed bool
}

func (s *savepoint) Commit(ctx context.Context) error {
	return s.end(ctx, "release savepoint "+s.name)
}

func (s *savepoint) Rollback(ctx context.Context) error {
	return s.end(ctx, "rollback to savepoint "+s.name+"; release savepoint "+s.name)
}

func (s *savepoint) end(ctx context.Context, sql string) error {
	if s.closed {
		return pgx.ErrTxClosed
	}
	s.closed = true
	_, err := s.Exec(ctx, sql)
	return err
}

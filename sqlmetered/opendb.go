package sqlmetered

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgmetered/metered/internal/fault"
)

// OpenDB returns a *sql.DB for an ORM, or for database/sql itself, on the pool that a Client has.
// Each use takes a connection of the pool and gives it back, whatever the *sql.DB is told.
// SetMaxIdleConns, which ORMs' tutorials call, has no effect. With stdlib.OpenDBFromPool it would
// keep connections from the Client. Bound connections by the pool's MaxConns.
//
// A prepared statement, such as gorm's PrepareStmt makes of all, is a statement's text: pgx
// prepares it when it first runs on a connection, and keeps it as the pool's DefaultQueryExecMode
// says. So it costs no round trip more, and an error in it is found when it runs.
//
// To close the *sql.DB leaves the pool open. The connections that Conn.Raw shows have stdlib.Conn's
// methods, such as Conn, and are of a type of their own. Without a pool each use of the *sql.DB is
// a *budget.ArgumentError.
func OpenDB(pool *pgxpool.Pool) *sql.DB {
	return sql.OpenDB(connector{stdlib.GetPoolConnector(pool), pool})
}

// connector lends connections of a pool to database/sql.
type connector struct {
	driver.Connector
	pool *pgxpool.Pool
}

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	if err := fault.NotNil(errArgument, "pool", c.pool); err != nil {
		return nil, err
	}
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return lent{conn.(*stdlib.Conn)}, nil
}

// lent is a connection that database/sql closes after each use, and so gives back.
type lent struct{ *stdlib.Conn }

// IsValid is asked before a connection is kept.
func (lent) IsValid() bool { return false }

func (c lent) Prepare(query string) (driver.Stmt, error) { return statement{c.Conn, query}, nil }

// PrepareContext asks the server for nothing: what it prepares would end with the connection's use.
func (c lent) PrepareContext(_ context.Context, query string) (driver.Stmt, error) {
	return c.Prepare(query)
}

// statement is a prepared statement, which pgx prepares.
type statement struct {
	conn  *stdlib.Conn
	query string
}

func (s statement) Close() error  { return nil }
func (s statement) NumInput() int { return -1 } // the server counts them

func (s statement) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.conn.ExecContext(ctx, s.query, args)
}

func (s statement) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.conn.QueryContext(ctx, s.query, args)
}

// errNoContext is of calls that database/sql does not make.
var errNoContext = errors.New("sqlmetered: a statement is run with a context")

func (s statement) Exec([]driver.Value) (driver.Result, error) { return nil, errNoContext }
func (s statement) Query([]driver.Value) (driver.Rows, error)  { return nil, errNoContext }

// Package inspect reads the schema for people who operate the library: hot scopes, held units, the
// outcome of an operation, the reason of a refusal. The command line and the page are made of it.
//
// Every call is a few statements without a lock, in the caller's transaction, READ ONLY too, and by
// a role that has metered.GrantReportingSQL alone. Every call is bounded: it looks at a few times
// MaxLooked rows at most, in a database of any size, and lists go on by a cursor. No statement
// reads a large table from end to end.
//
// Let connections have jit = off: with old statistics the planner expects all rows that a statement
// may read, and compiling it takes half a second.
//
// It repeats no public call: Ledger and Book are there for that.
package inspect

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/wallet"
)

// Bounds of every call.
const (
	DefaultPage = 100    // rows of a list
	MaxPage     = 1000   // of limit, rows of a list at most
	MaxLooked   = 10_000 // rows of a table that one statement looks at
)

// Errors of this package, beside those of the public calls.
var (
	ErrArgument error = errArgument                      // every refused argument, as a *budget.ArgumentError
	ErrUnknown        = errors.New("inspect: not found") // of a scope, an operation or a wallet
)

var errArgument = fault.New("invalid_argument", "inspect: invalid argument")

// DB is the common part of a *pgxpool.Pool, a *pgx.Conn and a pgx.Tx.
type DB = budget.Querier

// Reader reads one schema. It is safe for concurrent use if its DB is.
type Reader struct {
	// Ledger, Book and Wallets answer the rest: Ledger.Usage, Entries and Check, Book.Get, List,
	// Due and History, and Wallets.Balance and Statement, on DB.
	Ledger  *budget.Ledger
	Book    *holds.Book
	Wallets *wallet.Book
	DB      DB

	schema schema.Name
	river  string // River's job table, quoted
}

// New returns a Reader of the schema ("" means "metered"), and of River's tables where the
// search_path finds them.
func New(db DB, schemaName string) (*Reader, error) {
	if err := fault.NotNil(errArgument, "db", db); err != nil {
		return nil, err
	}
	name, err := schema.Parse(schemaName)
	if err != nil {
		return nil, invalid("schema", "%s", err)
	}
	r := &Reader{DB: db, schema: name, river: pgx.Identifier{"river_job"}.Sanitize()}
	if r.Ledger, err = budget.New(budget.Config{Schema: name.String()}); err != nil {
		return nil, err
	}
	if r.Book, err = holds.New(r.Ledger, holds.Config{}); err != nil {
		return nil, err
	}
	r.Wallets, err = wallet.New(r.Ledger, wallet.Config{})
	return r, err
}

// WithRiver returns a Reader that finds River's tables in that schema. "" leaves it to the
// search_path.
func (r *Reader) WithRiver(schemaName string) *Reader {
	other := *r
	other.river = pgx.Identifier{"river_job"}.Sanitize()
	if schemaName != "" {
		other.river = pgx.Identifier{schemaName, "river_job"}.Sanitize()
	}
	return &other
}

// On returns a Reader on another connection or transaction.
func (r *Reader) On(db DB) *Reader {
	other := *r
	other.DB = db
	return &other
}

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

func failed(doing string, err error) error { return fault.Failed("inspect", doing, err) }

// pageSize is the size of a page, with its default.
func pageSize(limit int) (int, error) {
	if limit == 0 {
		return DefaultPage, nil
	}
	if limit < 1 || limit > MaxPage {
		return 0, invalid("limit", "%d is not from 1 to %d", limit, MaxPage)
	}
	return limit, nil
}

func checkText(field, text string) error { return fault.Text(errArgument, field, text, 255) }

// query runs a statement of ours. It is planned at each call: a plan kept from when there was
// little reads all of it.
func (r *Reader) query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return answer.Query(ctx, r.DB, r.schema.SQL(sql), append([]any{pgx.QueryExecModeExec}, args...)...)
}

func (r *Reader) row(ctx context.Context, sql string, args ...any) pgx.Row {
	return answer.QueryRow(ctx, r.DB, r.schema.SQL(sql), append([]any{pgx.QueryExecModeExec}, args...)...)
}

// collect runs a statement and returns its rows.
func collect[T any](ctx context.Context, r *Reader, sql string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	rows, err := r.query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scan)
}

// now is the database's clock.
func (r *Reader) now(ctx context.Context) (now time.Time, err error) {
	err = r.row(ctx, `select metered.clock()`).Scan(&now)
	return now.UTC(), failed("clock", err)
}

// scopeKey is the key of the lock of a scope.
func (r *Reader) scopeKey(scope string) int64 {
	return lockkey.Of("metered/scope/"+r.schema.String(), scope)
}

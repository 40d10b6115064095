// Package citusjobs has River's driver for tables that are a shard of a Citus cluster.
//
//	client, err := river.NewClient(citusjobs.New(pool), &river.Config{Schema: "metered", …})
//
// The driver replaces statements of River that Citus refuses, with this process's times for the
// server's. Only clients on the node that sent a NOTIFY hear it: others see a job at their next
// river.Config.FetchPollInterval.
package citusjobs

import (
	"context"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
)

// New sends no SQL. river.JobCompleteTx[*riverpgxv5.Driver] works with it, too: River takes the
// driver of its client.
func New(pool *pgxpool.Pool) riverdriver.Driver[pgx.Tx] {
	return &driver{riverpgxv5.New(pool), pool}
}

type driver struct {
	*riverpgxv5.Driver
	pool *pgxpool.Pool
}

func (d *driver) GetExecutor() riverdriver.Executor {
	return d.Driver.UnwrapExecutor(&citusPool{citusTx{noTx{d.pool}}, d.pool})
}

func (d *driver) UnwrapExecutor(tx pgx.Tx) riverdriver.ExecutorTx {
	return d.Driver.UnwrapExecutor(&citusTx{tx})
}

func (d *driver) UnwrapTx(tx riverdriver.ExecutorTx) pgx.Tx {
	return d.Driver.UnwrapTx(tx).(*citusTx).Tx
}

// noTx has the methods of a transaction that River calls on a pool.
type noTx struct{ *pgxpool.Pool }

func (noTx) Commit(context.Context) error   { return pgx.ErrTxClosed }
func (noTx) Rollback(context.Context) error { return pgx.ErrTxClosed }
func (noTx) LargeObjects() pgx.LargeObjects { return pgx.LargeObjects{} }
func (noTx) Conn() *pgx.Conn                { return nil }
func (noTx) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, pgx.ErrTxClosed
}

// citusTx words River's statements for Citus.
type citusTx struct{ pgx.Tx }

func (t *citusTx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &citusTx{tx}, nil
}

func (t *citusTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	sql, args = forCitus(sql, args)
	return t.Tx.Exec(ctx, sql, args...)
}

func (t *citusTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	sql, args = forCitus(sql, args)
	return t.Tx.Query(ctx, sql, args...)
}

func (t *citusTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	sql, args = forCitus(sql, args)
	return t.Tx.QueryRow(ctx, sql, args...)
}

// citusPool is a pool as River sees it.
type citusPool struct {
	citusTx
	pool *pgxpool.Pool
}

func (p *citusPool) Config() *pgxpool.Config { return p.pool.Config() }

var (
	timeOrNow = regexp.MustCompile(`coalesce\(\$(\d+)::timestamptz, now\(\)\)`)
	notified  = regexp.MustCompile(`(?s)(THEN pg_notify\(.*?::text\s*\)) END`)
)

// forCitus replaces the server's time by this process's, since Citus refuses now() in COALESCE
// where it updates or deletes, and gives the answer of a NOTIFY a type that a column may have.
func forCitus(sql string, args []any) (string, []any) {
	for _, m := range timeOrNow.FindAllStringSubmatch(sql, -1) {
		n, _ := strconv.Atoi(m[1])
		if at, ok := args[n-1].(*time.Time); ok && at == nil {
			now := time.Now()
			args[n-1] = &now
		}
	}
	return notified.ReplaceAllString(timeOrNow.ReplaceAllString(sql, "$$$1::timestamptz"), "$1::text END"), args
}

package budget_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/pgtest"
)

// start is where the clocks of the tests begin.
var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// newLedger waits a minute for locks unless cfg says otherwise: a busy machine can need more than five seconds.
func newLedger(t testing.TB, cfg budget.Config) *budget.Ledger {
	t.Helper()
	if cfg.LockTimeout == 0 {
		cfg.LockTimeout = time.Minute
	}
	l, err := budget.New(cfg)
	require.NoError(t, err)
	return l
}

// open returns a database of its own with its clock stopped at start.
func open(t testing.TB) (*pgxpool.Pool, *budget.Ledger, *pgtest.Clock) {
	t.Helper()
	pool := pgtest.Open(t)
	return pool, newLedger(t, budget.Config{}), pgtest.SetClock(t, pool, start)
}

// charge charges one scope in a transaction of its own.
func charge(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, scope string, amount int64, limits ...budget.Limit) (budget.Posted, error) {
	var posted budget.Posted
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err := l.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: amount, Limits: limits})
		if err == nil {
			posted = r.Entries[0]
		}
		return err
	})
	return posted, err
}

func mustCharge(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, scope string, amount int64, limits ...budget.Limit) budget.Posted {
	t.Helper()
	posted, err := charge(t.Context(), pool, l, scope, amount, limits...)
	require.NoError(t, err)
	return posted
}

func mustCredit(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, scope string, amount int64) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := l.Credit(t.Context(), tx, budget.Credit{Scope: scope, Amount: amount})
		return err
	}))
}

func refund(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, scope string, seq, amount int64) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := l.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: seq, Amount: amount})
		return err
	})
}

// prepareCharges is a step that the package lends to its siblings.
var prepareCharges = lend.Borrow[interface {
	Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
}]("budget").Charges

// chargeSQL is the full function, for chargeArgs.
const chargeSQL = `
select seqs, ats, used, held, refused, periods, crossed
from metered.charge($1::metered.new_charge[], $2::interval, $3::int, $4::bool)`

func chargeArgs(c *ledger.ChargeCall[budget.Receipt]) []any {
	return []any{ledger.Charges(c.Charges), c.Tolerance, 5000, c.Standing}
}

// chargeMany appends n charges of one unit in one round trip per hundred.
func chargeMany(t testing.TB, db interface {
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}, l *budget.Ledger, scope string, n int) {
	t.Helper()
	call, err := prepareCharges(l, budget.Charge{Scope: scope, Amount: 1})
	require.NoError(t, err)
	for n > 0 {
		batch := &pgx.Batch{}
		for range min(n, 100) {
			batch.Queue(chargeSQL, chargeArgs(call)...)
		}
		n -= batch.Len()
		require.NoError(t, db.SendBatch(t.Context(), batch).Close())
	}
}

func usage(t testing.TB, db budget.Querier, l *budget.Ledger, scope string, window time.Duration) budget.Usage {
	t.Helper()
	u, err := l.Usage(t.Context(), db, budget.Query{Scope: scope, Window: window})
	require.NoError(t, err)
	return u[0]
}

func requireVerified(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger) {
	t.Helper()
	report, err := l.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

func purge(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, olderThan time.Duration) budget.PurgeReport {
	t.Helper()
	report, err := l.Purge(t.Context(), pool, budget.PurgeOptions{OlderThan: olderThan})
	require.NoError(t, err)
	return report
}

func execute(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// withoutLocks makes the advisory locks of a database do nothing. Only its owner
// can. Call it before anything else uses the database.
func withoutLocks(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	execute(t, pool, `do $$
		declare f text;
		begin
			for f in select pg_get_functiondef(p.oid) from pg_proc p
			         where p.pronamespace = 'metered'::regnamespace and p.proname like '\_lock\_keys%' loop
				f := replace(f, 'pg_try_advisory_xact_lock(key)', 'true');
				execute replace(f, 'pg_advisory_xact_lock(key)', '1');
			end loop;
		end $$`)
}

// theFullWay has every call of a database decided by the full functions. Only its owner can. Call it
// before anything else uses the database.
func theFullWay(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	execute(t, pool, `create or replace function metered._goes_short() returns boolean language sql immutable as 'select false'`)
}

func code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// begin opens a transaction that is rolled back at the end of the test.
func begin(t testing.TB, pool *pgxpool.Pool, iso pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: iso})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// isA reports whether err's chain holds a T.
func isA[T error](err error) bool {
	var target T
	return errors.As(err, &target)
}

// tuplesFetched is how many rows of a table index scans have fetched so far, as
// seen by one connection's own statements once they are flushed.
func tuplesFetched(t testing.TB, conn *pgxpool.Conn, table string) (n int64) {
	t.Helper()
	return tableStat(t, conn, table, "idx_tup_fetch")
}

// tableStat reads a column of pg_stat_user_tables after flushing the connection's own statistics.
func tableStat(t testing.TB, conn *pgxpool.Conn, table, column string) (n int64) {
	t.Helper()
	pgtest.FlushStatistics(t, conn)
	err := conn.QueryRow(t.Context(), "select "+column+" from pg_stat_user_tables where schemaname = 'metered' and relname = $1", table).Scan(&n)
	require.NoError(t, err)
	return n
}

// autocommit is a transaction per statement, which saves two round trips.
type autocommit struct {
	pgx.Tx
	budget.Querier
}

func (a autocommit) Conn() *pgx.Conn { return nil }

func (a autocommit) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return a.Querier.QueryRow(ctx, sql, args...)
}

func (a autocommit) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return a.Querier.Query(ctx, sql, args...)
}

// splitScope is a step that the package lends to its siblings.
var splitScope = lend.Borrow[interface {
	SplitScope(scope string) (kind, key, slot string, err error)
}]("budget").SplitScope

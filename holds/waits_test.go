package holds_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/sqlstate"
)

var isolations = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func execute(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func queryRow[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

// begin opens a transaction that is rolled back at the end of the test.
func begin(t testing.TB, pool *pgxpool.Pool, iso pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: iso})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// retrier runs transactions of one call each, and tries them again after 40001. A
// deadlock is an error, unless it is asked for: no two calls lock in different orders.
type retrier struct {
	pool      *pgxpool.Pool
	deadlocks bool
	retries   atomic.Int64
}

func (r *retrier) run(ctx context.Context, iso pgx.TxIsoLevel, f func(tx pgx.Tx) error) error {
	const attempts = 2000
	var err error
	for range attempts {
		err = pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{IsoLevel: iso}, f)
		if c := code(err); c != sqlstate.SerializationFailure && !(r.deadlocks && c == sqlstate.DeadlockDetected) {
			return err
		}
		r.retries.Add(1)
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
	}
	return fmt.Errorf("gave up after %d attempts: %w", attempts, err)
}

// dump is all that the tables of holds and the ledger have in them.
func (f *fixture) dump() []string {
	f.Helper()
	var all []string
	for _, table := range []string{"ledger", "refund_sum", "holds", "hold_lines", "hold_events"} {
		rows, err := f.pool.Query(f.Context(), `select row_to_json(x)::text as r from metered.`+table+` x order by r`)
		require.NoError(f, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(f, err)
		all = append(all, table)
		all = append(all, lines...)
	}
	return all
}

// isA reports whether err's chain holds a T.
func isA[T error](err error) bool {
	var target T
	return errors.As(err, &target)
}

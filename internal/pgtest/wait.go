package pgtest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// toTell is how long before the end of the test binary a wait is given up, to say what for.
const toTell = 15 * time.Second

// Patience is until when a test waits for what must come: shortly before its binary is ended
// (-timeout). A machine that is busy may take any time, so no shorter time says that something is
// wrong.
func Patience(t testing.TB) time.Time {
	if bounded, ok := t.(interface{ Deadline() (time.Time, bool) }); ok {
		if end, ok := bounded.Deadline(); ok {
			return end.Add(-toTell)
		}
	}
	return time.Now().Add(time.Hour)
}

// Patient is a context that ends when the Patience of the test does, and not with the test.
func Patient(t testing.TB) (context.Context, context.CancelFunc) {
	return context.WithDeadline(context.Background(), Patience(t))
}

// WaitFor returns when ok does, and fails the test when its Patience ends.
func WaitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	pause := time.Millisecond
	for deadline := Patience(t); !ok(); time.Sleep(pause) {
		pause = min(2*pause, 20*time.Millisecond) // asking takes processor time from the awaited
		if time.Now().After(deadline) {
			t.Fatalf("pgtest: waited too long for %s", what)
		}
	}
}

// WaitQueued returns when n sessions of the database wait for a lock, advisory or of a row.
func WaitQueued(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	WaitFor(t, fmt.Sprintf("%d sessions to wait for a lock", n), func() bool { return Queued(t, pool) == n })
}

// Queued is how many sessions of the database wait for a lock.
func Queued(t testing.TB, pool *pgxpool.Pool) (n int) {
	t.Helper()
	err := pool.QueryRow(context.Background(), `select count(*) from pg_stat_activity
		where datname = current_database() and wait_event_type = 'Lock'`).Scan(&n)
	if err != nil {
		t.Fatalf("pgtest: counting who waits: %v", err)
	}
	return n
}

// Going runs f in a goroutine and returns a channel with its error.
func Going(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}

// InParallel runs workers and returns their errors.
func InParallel(workers int, f func(worker int) error) error {
	done := make([]<-chan error, workers)
	for w := range workers {
		done[w] = Going(func() error { return f(w) })
	}
	var err error
	for _, d := range done {
		err = errors.Join(err, <-d)
	}
	return err
}

// Value returns the one value of a query.
func Value[T any](t testing.TB, db interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}, sql string, args ...any) T {
	t.Helper()
	ctx, cancel := Patient(t)
	defer cancel()
	rows, err := db.Query(ctx, sql, args...)
	if err == nil {
		var v T
		if v, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[T]); err == nil {
			return v
		}
	}
	t.Fatalf("pgtest: %s: %v", sql, err)
	panic("not reached")
}

// WaitSettled returns when no other session of the database is in a transaction.
func WaitSettled(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	WaitFor(t, "the end of all transactions", func() bool {
		return Value[int](t, pool, `select count(*) from pg_stat_activity where datname = current_database()
			and pid <> pg_backend_pid() and xact_start is not null and backend_type = 'client backend'`) == 0
	})
}

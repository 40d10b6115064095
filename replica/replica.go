// Package replica reads a primary's commits from a physical replica: a write notes the end of the
// log, and a read waits until the replica has come so far.
package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
)

// LSN is a position in a primary's log. As text it is a pg_lsn, such as "16/B374D848". It means
// nothing to the new primary after a failover.
type LSN uint64

// ParseLSN parses the text of a pg_lsn, such as "16/B374D848", as LSN.String returns it.
func ParseLSN(text string) (LSN, error) {
	high, low, ok := strings.Cut(text, "/")
	h, errHigh := strconv.ParseUint(high, 16, 32)
	l, errLow := strconv.ParseUint(low, 16, 32)
	if !ok || errHigh != nil || errLow != nil {
		return 0, invalid("lsn", "%q is not of the form 16/B374D848", text)
	}
	return LSN(h<<32 | l), nil
}

func (l LSN) String() string { return fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l)) }

func (l LSN) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

func (l *LSN) UnmarshalText(text []byte) (err error) {
	*l, err = ParseLSN(string(text))
	return err
}

// CommitLSN returns an LSN after all commits on the primary so far. Call it after a commit, with a
// pool or connection of the primary, not a pgx.Tx. metered.Command.LSN saves the round trip.
func CommitLSN(ctx context.Context, db querier) (LSN, error) {
	if err := notNil("db", db); err != nil {
		return 0, err
	}
	if _, ok := db.(pgx.Tx); ok {
		return 0, invalid("db", "is a transaction, whose commit is yet to come")
	}
	return scanLSN(answer.QueryRow(ctx, db, ledger.EndSQL))
}

const readSQL = `
select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()::text else (` + ledger.EndSQL + `) end`

// ReadLSN returns an LSN after all earlier reads from db, for ReadAt on another server. db may be a
// replica, or a transaction, whose own writes are not covered.
func ReadLSN(ctx context.Context, db querier) (LSN, error) {
	if err := notNil("db", db); err != nil {
		return 0, err
	}
	return scanLSN(answer.QueryRow(ctx, db, readSQL))
}

func scanLSN(row pgx.Row) (LSN, error) {
	var text string
	if err := row.Scan(&text); err != nil {
		return 0, fault.Failed("replica", "ask for the position", err)
	}
	return ParseLSN(text)
}

// querier runs a query: a *pgxpool.Pool, a *pgx.Conn or, for ReadLSN, a pgx.Tx.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Reads without an answer.
var (
	// ErrStale says that the replica stayed behind, or did not answer. It is also
	// context.DeadlineExceeded.
	ErrStale error = errStale

	// ErrAhead says that a position is ahead of a primary: it is from another cluster, or was lost by
	// a failover.
	ErrAhead error = fault.New("position_unknown", "replica: the position is not one of this server")

	errStale = fault.New("stale_read", "replica: the replica is behind the position that was asked for")
)

var errArgument = fault.New("invalid_argument", "replica: invalid argument")

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// staleError says how far a replica was behind.
type staleError struct {
	// Wanted is the position that the caller asked for.
	Wanted LSN

	// Reached is how far the replica had come, or 0 if it did not say.
	Reached LSN

	// Waited is how long the call waited for it.
	Waited time.Duration
}

func (e *staleError) Error() string {
	return fmt.Sprintf("%v: wanted %v, reached %v, waited %v", errStale, e.Wanted, e.Reached,
		e.Waited.Round(time.Millisecond))
}

func (e *staleError) Unwrap() error { return errStale }

const defaultTimeout = 5 * time.Second

const (
	minPoll, maxPoll = time.Millisecond, 100 * time.Millisecond
	answerTimeout    = time.Second // for the replica, beyond the timeout
)

// ReadAt calls fn with a connection of the replica, once every commit before lsn is visible there.
// Its error is returned unchanged. The timeout bounds the wait for the replica, and not fn: it is
// from 1ms to 1h, and 0 is 5s. The deadline of ctx bounds both.
//
// There must be no pooler that spreads statements over servers. The primary works too. If an idle
// primary has open transactions, the wait can take some 15 seconds. Errors before fn is called:
// *budget.ArgumentError, ErrStale (ask the primary), and ErrAhead.
func ReadAt(ctx context.Context, pool *pgxpool.Pool, lsn LSN, timeout time.Duration,
	fn func(context.Context, *pgx.Conn) error) error {
	if timeout == 0 {
		timeout = defaultTimeout
	}
	if err := cmp.Or(notNil("pool", pool), notNil("fn", fn)); err != nil {
		return err
	}
	switch {
	case lsn == 0:
		return invalid("lsn", "is 0, which is after no write")
	case timeout < time.Millisecond || timeout > time.Hour:
		return invalid("timeout", "%v is not from 1ms to 1h", timeout)
	}
	w := wait{began: time.Now(), timeout: timeout, stale: &staleError{Wanted: lsn}}
	asking, cancel := context.WithTimeout(ctx, timeout+answerTimeout)
	defer cancel()
	conn, err := pool.Acquire(asking)
	if err != nil {
		return w.failed(ctx, err)
	}
	defer conn.Release()
	if err := w.await(asking, conn.Conn()); err != nil {
		return w.failed(ctx, err)
	}
	return fn(ctx, conn.Conn())
}

// wait is a call of ReadAt before fn.
type wait struct {
	began   time.Time
	timeout time.Duration
	stale   *staleError
}

const replayedSQL = `
select r.replica, case when r.replica then pg_catalog.pg_last_wal_replay_lsn() else pg_catalog.pg_current_wal_insert_lsn() end::text
from pg_catalog.pg_is_in_recovery() r(replica)`

// await returns when the server has come to the position.
func (w *wait) await(ctx context.Context, conn *pgx.Conn) error {
	for pause := minPoll; ; pause = min(2*pause, maxPoll) {
		var replica bool
		var text *string // null until something was replayed
		if err := answer.QueryRow(ctx, conn, replayedSQL).Scan(&replica, &text); err != nil {
			return err
		}
		if text != nil {
			reached, err := ParseLSN(*text)
			if err != nil {
				return err
			}
			w.stale.Reached = reached
		}
		left := w.timeout - time.Since(w.began)
		switch {
		case w.stale.Reached >= w.stale.Wanted:
			return nil
		case !replica:
			return fmt.Errorf("%w: %v, and it has come to %v", ErrAhead, w.stale.Wanted, w.stale.Reached)
		case left <= 0:
			return context.DeadlineExceeded
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(pause, left)):
		}
	}
}

// failed returns the error of ReadAt. It makes no difference whether its own time or ctx's was
// over, nor whether there was an answer.
func (w *wait) failed(ctx context.Context, err error) error {
	w.stale.Waited = time.Since(w.began)
	switch {
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", w.stale, err)
	case errors.Is(err, ErrAhead):
		return err
	}
	return fault.Failed("replica", "read at "+w.stale.Wanted.String(), err)
}

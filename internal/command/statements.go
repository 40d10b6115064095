package command

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// StatementError is the error of the server about a statement of Command.Statements. Nothing of the
// command was done.
type StatementError struct {
	// Index is the place of the statement in the batch, from 0.
	Index int

	// Cause is the error, a *pgconn.PgError below it.
	Cause error
}

func (e *StatementError) Error() string {
	return fmt.Sprintf("metered: Command.Statements[%d]: %v", e.Index, e.Cause)
}

// Unwrap returns the cause.
func (e *StatementError) Unwrap() error { return e.Cause }

// declared makes an attempt in one flush, with COMMIT, at an operation of statements, steps and
// charges.
// The claim raises unless the id is new, so that the server skips the rest. Then declared is false,
// and nothing was done. Nobody gets at the transaction, so it has no guard: its marker says so. A
// text that may be the name of a prepared COMMIT is sent the guarded way.
func (e *Engine) declared(ctx context.Context, op *Operation, t *owned, end Ending) (a attempt, declared bool) {
	defer t.undo(ctx)
	op.Failed = false
	op.Attempts++
	a.ending, a.end = true, end
	f, b := &flush{}, &begun{marker: "-" + newMarker()}
	t.first(f)
	rec := Record{Result: end.Result}
	wait, left := e.timeouts(ctx)
	if end.whole(op) {
		e.queueWhole(f, op, end, b, &rec, wait)
	} else {
		f.json(b.readClaim, e.sql.beginPlain, e.claimArgs(op, t.settings(left), b.marker, wait, true)...)
	}
	for i, q := range op.Statements {
		checked, err := guardtx.Checked(t.conn.Conn(), q)
		if err != nil {
			op.Failed, a.err = true, &StatementError{i, err}
			return a, true
		}
		if !guardtx.IsStatement(q.SQL) {
			op.Attempts--
			return attempt{}, false
		}
		f.queue(reading{of: func(err error) error { return ofStatement(i, err) }}, checked.SQL, checked.Arguments)
	}
	if !end.whole(op) {
		e.queue(ctx, f, op, end, false, false)
		e.complete(ctx, f, op, end, &rec, b.marker, false)
	}
	t.end(&f.batch)
	within, span := e.flush(ctx, op, "run")
	results := t.send(within, &f.batch)
	unread, err := f.readAll(results)
	others := false
	a.begun = b.status == statusNew
	a.claimed = a.begun
	if err == nil {
		others, err = t.ended(results)
	}
	closing := results.Close()
	if sqlstate.Of(err) == sqlstate.KnownID {
		op.Attempts-- // the attempt goes on
		span.End(nil)
		return attempt{}, false
	}
	err = op.ofBatch(err)
	a.unknown, err = t.outcome(ctx, &rec, unread, err, closing)
	var statement *StatementError
	switch {
	case err == nil:
		a.rec = rec
	case errors.As(err, &statement):
		op.Failed = !a.unknown
	case others:
		err = foreign("commit", err)
	default:
		err = failed("complete", ofCharges(end.Charges, err))
	}
	span.End(err)
	a.err = err
	return a, true
}

// sendStatements sends the operation's statements in a transaction that has claimed its id.
func (op *Operation) sendStatements(ctx context.Context, tx pgx.Tx) error {
	batch := &pgx.Batch{}
	for _, q := range op.Statements {
		batch.Queue(q.SQL, q.Arguments...)
	}
	over := new(atomic.Bool)
	defer over.Store(true)
	results := guardtx.New(tx, over).SendBatch(ctx, batch)
	var err error
	for i := 0; i < len(op.Statements) && err == nil; i++ {
		_, err = results.Exec()
		err = ofStatement(i, err)
	}
	return op.ofBatch(firstOf(err, results.Close()))
}

// ofStatement is the server's error about a statement. Another error, such as of the connection, is
// about none.
func ofStatement(i int, err error) error {
	var pg *pgconn.PgError
	var before pgx.ErrPreprocessingBatch
	if errors.As(err, &pg) && !errors.As(err, &before) {
		return &StatementError{i, err}
	}
	return err
}

// ofBatch names the statement that could not be prepared.
func (op *Operation) ofBatch(err error) error {
	var before pgx.ErrPreprocessingBatch
	if errors.As(err, &before) {
		for i, q := range op.Statements {
			if q.SQL == before.SQL() {
				return &StatementError{i, err}
			}
		}
	}
	return err
}

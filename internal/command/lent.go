package command

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/savepoint"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// lent is a transaction of a caller's. The engine has the part between a savepoint and its release.
type lent struct {
	bare pgx.Tx
	set  bool // the savepoint is there
}

func (l *lent) first(f *flush) {
	f.queue(reading{done: &l.set}, "savepoint metered_command", nil)
}

func (l *lent) send(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	return answer.SendBatch(ctx, l.bare, batch)
}

func (l *lent) aborted(err error) error {
	if l.set || sqlstate.Of(err) != sqlstate.InFailedTransaction {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrAborted, err)
}

func (l *lent) tx() pgx.Tx { return l.bare }

// settings are the caller's.
func (l *lent) settings(int32) *int32 { return nil }

func (l *lent) early(*flush) {}

func (l *lent) end(batch *pgx.Batch) { batch.Queue("release savepoint metered_command") }

func (l *lent) ended(results pgx.BatchResults) (foreign bool, err error) {
	_, err = results.Exec()
	return false, err
}

// outcome after an answer that cannot be read leaves a transaction that cannot be committed: its
// savepoint is gone, which undo asks for.
func (l *lent) outcome(_ context.Context, _ *Record, unread, err, closing error) (unknown bool, _ error) {
	err = cmp.Or(err, closing, unread)
	l.set = err != nil
	return false, err
}

// replay makes the caller's COMMIT wait for the log, which a COMMIT after mere reads would not do,
// and takes the transaction back to where it was, as undo does.
func (l *lent) replay(ctx context.Context, _ *Record) (unknown bool, _ error) {
	l.set = false
	if _, err := l.bare.Exec(ctx, undoSQL+"; select "+writeSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return false, failed("replay", err)
	}
	return false, nil
}

// undoSQL is one text, because a failed transaction can run the first statement but
// not prepare the second.
const undoSQL = "rollback to savepoint metered_command; release savepoint metered_command"

func (l *lent) undo(ctx context.Context) {
	if !l.set {
		return
	}
	ctx, cancel := savepoint.Undoing(ctx)
	defer cancel()
	_, _ = l.bare.Exec(ctx, undoSQL, pgx.QueryExecModeSimpleProtocol)
}

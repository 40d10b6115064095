package command

import (
	"bytes"
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/ledger"
)

// Step is one call at the end of a command, as a piece made it: its locks, its statement, the
// reading of its answer.
type Step struct {
	locks   ledger.Locks
	sql     string
	whole   string // ledger.Call.WholeSQL
	args    func(ledger.Sending) []any
	read    func(pgx.Row) error
	queries []*ledger.Query
	tell    func(context.Context, pgx.Tx) error // calls subscribers, nil without any
	cross   func(context.Context, pgx.Tx) error // reports the thresholds that were crossed, nil without any
}

// StepOf makes a call a step. answered is given its answer, if it is not nil.
func StepOf[R any](call *ledger.Call[R], answered func(R)) Step {
	var answer R
	s := Step{locks: call.Locks, sql: call.SQL, whole: call.WholeSQL, args: call.Args, queries: call.Queries, cross: call.Cross}
	s.read = func(row pgx.Row) (err error) {
		if answer, err = call.Scan(row); err == nil && answered != nil {
			answered(answer)
		}
		return err
	}
	if call.Tell != nil {
		s.tell = func(ctx context.Context, tx pgx.Tx) error { return call.Tell(ctx, tx, answer) }
	}
	return s
}

// whole reports whether one statement does all of an operation that ends so.
func (end *Ending) whole(op *Operation) bool {
	return len(op.Statements) == 0 && len(end.Steps) == 1 && end.Steps[0].whole != "" && end.Charges == nil
}

// queueWhole queues that statement. Its answer is that of complete_command_plain, a line feed, and
// that of the step.
func (e *Engine) queueWhole(f *flush, op *Operation, end Ending, b *begun, rec *Record, wait int32) {
	step := end.Steps[0]
	args := step.args(ledger.Sending{WaitMS: wait, Tenant: op.Tenant, Operation: op.ID, Raising: true})
	read := func(results pgx.BatchResults) error {
		text, err := answer.JSON(results.Query())
		completed, stepped, _ := bytes.Cut(text, []byte("\n"))
		if err == nil {
			b.status = statusNew
			rec.At, err = rec.ScanCompleted(completed, nil)
		}
		return step.read(rawRow{stepped, err})
	}
	f.queue(reading{all: read}, step.whole, append(args, op.Key, op.issued(), e.future, op.Fingerprint, end.Result, op.named()))
}

// rawRow is a row of one value as the server sent it, or an error.
type rawRow struct {
	value []byte
	err   error
}

func (r rawRow) Scan(dest ...any) error {
	if r.err == nil {
		*dest[0].(*[]byte) = r.value
	}
	return r.err
}

// locks are those of an ending, if they must be taken before its steps: these take theirs one after
// the other.
func (end *Ending) locks() []ledger.Locks {
	var all []ledger.Locks
	if end.Charges != nil {
		all = append(all, end.Charges.SummedLocks())
	}
	for _, s := range end.Steps {
		all = append(all, s.locks)
	}
	return all
}

// turn is the least of the locks of an ending, by which calls that met there wait for each other; 0
// without any.
func (end *Ending) turn() int64 {
	var keys []int64
	for _, l := range end.locks() {
		keys = append(keys, l.Keys...)
	}
	if len(keys) == 0 {
		return 0
	}
	return slices.Min(keys)
}

// queries are to be asked under the locks.
func (end *Ending) queries() (all []*ledger.Query) {
	if end.Charges != nil {
		all = append(all, end.Charges.Queries...)
	}
	for _, s := range end.Steps {
		all = append(all, s.queries...)
	}
	return all
}

// queue queues the steps of an ending. If they are more than one, or if it charges too, all locks
// are taken first, in one order, unless they are taken.
func (e *Engine) queue(ctx context.Context, f *flush, op *Operation, end Ending, locked, telling bool) {
	wait, _ := e.timeouts(ctx)
	if all := end.locks(); len(all) > 1 && !locked {
		f.exec(e.sql.lockAll, ledger.LockAllArgs(wait, all...)...)
	}
	sending := ledger.Sending{WaitMS: wait, Tenant: op.Tenant, Operation: op.ID, Raising: true, Telling: telling}
	for _, s := range end.Steps {
		f.row(s.read, s.sql, s.args(sending)...)
	}
}

package command

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/ledger"
)

// Step is what a command does at its end.
type Step struct {
	locks ledger.Locks
	sql   string
	args  func(ledger.Sending) []any
	read  func(pgx.Row) error
	tell  func(context.Context, pgx.Tx) error // nil if nobody is to be told
}

// StepOf makes a call a step. answered is given its answer, if it is not nil.
func StepOf[R any](call *ledger.Call[R], answered func(R)) Step {
	var answer R
	s := Step{locks: call.Locks, sql: call.SQL, args: call.Args}
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

const lockAllSQL = `select metered.lock_all($1::bigint[], $2::bigint[], $3::text[], $4::metered.hold_ids[], $5::int)`

// queue queues the steps of an ending. If they are more than one, or if it charges too, all locks are
// taken first, in one order.
func (e *Engine) queue(ctx context.Context, f *flush, op *Operation, end Ending) {
	wait, _ := e.timeouts(ctx)
	if len(end.Steps) > 1 || len(end.Steps) == 1 && end.Charges != nil {
		keys, idKeys := []int64{}, []int64{} // not nil, which is sent as null
		scopes := []string{}
		var named []ledger.HoldIDs
		lock := func(l ledger.Locks) {
			keys, idKeys, scopes = append(keys, l.Keys...), append(idKeys, l.IDKeys...), append(scopes, l.Scopes...)
			if l.Holds != nil {
				named = append(named, *l.Holds)
			}
		}
		if end.Charges != nil {
			lock(end.Charges.Locks)
		}
		for _, s := range end.Steps {
			lock(s.locks)
		}
		f.exec(e.sql.lockAll, inOrder(keys), inOrder(idKeys), scopes, ledger.AllHoldIDs(named), wait)
	}
	sending := ledger.Sending{WaitMS: wait, Namespace: op.Namespace, Operation: op.ID, Raising: true}
	for _, s := range end.Steps {
		f.row(s.read, s.sql, s.args(sending)...)
	}
}

func inOrder(keys []int64) []int64 {
	slices.Sort(keys)
	return slices.Compact(keys)
}

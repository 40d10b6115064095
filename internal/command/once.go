package command

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
)

// Once does one step of an operation in a transaction of its own at READ COMMITTED, which writes no
// record: in one flush with BEGIN and COMMIT, unless limits are to be asked for, or there are
// subscribers, or op is Telling. It retries as Do does. After a COMMIT whose answer was lost it
// does the step again: the step must find its own earlier work, which may be seen and not be
// durable. So that attempt passes a barrier, as each one does with EarlyRelease.
func (e *Engine) Once(ctx context.Context, op *Operation, step Step) error {
	op.Isolation = pgx.ReadCommitted
	_, err := e.repeat(ctx, op, func(ctx context.Context, lost bool) attempt {
		op.EarlyRelease = op.EarlyRelease || lost
		op.Attempts++
		a := e.once(ctx, op, step)
		a.claimed = a.err == nil // also after a lost COMMIT: the step is done
		a.found = a.claimed
		e.tell(ctx, lost, &a)
		return a
	})
	return err
}

// OnceTx is Once in tx, a transaction of the caller's, between a savepoint and its release. It
// makes one attempt, and takes back one whose step sets refusal, which it returns.
func (e *Engine) OnceTx(ctx context.Context, tx pgx.Tx, op *Operation, step Step, refusal *error) error {
	l := &lent{bare: tx}
	if err := e.cfg.Usable(ctx, tx); err != nil {
		return cmp.Or(l.aborted(err), err)
	}
	op.Attempts++
	defer l.undo(ctx)
	_, err := e.step(ctx, l, op, step, refusal, new(bool))
	return err
}

func (e *Engine) once(ctx context.Context, op *Operation, step Step) (a attempt) {
	conn, err := e.connect(ctx)
	if err != nil {
		return attempt{err: err}
	}
	defer conn.Release()
	o := &owned{conn: conn, op: op, pins: e.pins}
	defer o.undo(ctx)
	if a.err = e.cfg.Usable(ctx, conn); a.err == nil {
		a.unknown, a.err = e.step(ctx, o, op, step, nil, &a.begun)
	}
	if a.judge(ctx, conn); a.err != nil && !a.unknown && conn.Conn().IsClosed() {
		a.err = &fault.Lost{Err: a.err}
	}
	commit.Leave(ctx, conn.Conn(), a.err)
	return a
}

// step sends the flushes of a step. begun is set when the first one was answered, unless it ends
// the transaction. With a refusal to look at, which the step may set, t ends after it.
func (e *Engine) step(ctx context.Context, t transaction, op *Operation, step Step, refusal *error, begun *bool) (unknown bool, err error) {
	wait, _ := e.timeouts(ctx)
	f := &flush{}
	t.first(f)
	e.enter(ctx, f, op)
	a, err := e.asks(t, op, step.queries)
	if err != nil {
		return false, err
	}
	if a != nil {
		if f, err = e.stepAsks(ctx, t, a, f, step.locks, begun); err != nil {
			return false, err
		}
		defer func() {
			if !unknown {
				err = a.failed(err)
			}
		}()
	}
	telling := op.Telling || step.tell != nil
	t.early(f)
	f.row(step.read, step.sql, step.args(ledger.Sending{WaitMS: wait, Tenant: op.Tenant, Operation: op.ID, Telling: telling})...)
	if telling || refusal != nil {
		if err := send(ctx, t, f); err != nil {
			return false, cmp.Or(t.aborted(err), failed("open", err))
		}
		*begun = true
		if refusal != nil && *refusal != nil {
			return false, *refusal
		}
		f = &flush{}
	}
	if telling {
		if err := tell(ctx, t.tx(), Ending{Steps: []Step{step}}, nil); err != nil {
			return false, foreign("open", err)
		}
	}
	t.end(&f.batch)
	results := next(ctx, t, &f.batch)
	unread, err := f.readAll(results)
	if err == nil {
		_, err = t.ended(results)
	}
	if unknown, err = t.outcome(ctx, &Record{}, unread, err, results.Close()); err != nil {
		err = failed("open", err)
	}
	return unknown, err
}

// stepAsks asks the queries of a step, in f, which is then a new flush, or in one of its own if the
// locks come first. Of known answers f stays. The operation's lock comes before those of the step.
func (e *Engine) stepAsks(ctx context.Context, t transaction, a *asks, f *flush, locks ledger.Locks, begun *bool) (*flush, error) {
	wait, _ := e.timeouts(ctx)
	own := ledger.Locks{Keys: []int64{a.op.Key}}
	if a.known && len(locks.Sums) == 0 && locks.Holds == nil { // else the keys are sorted anew
		a.again(f, lockThem(wait, a.op, locks))
		return f, nil
	}
	f.exec(e.sql.lockAll, ledger.LockAllArgs(wait, own)...)
	if a.known {
		a.again(f, ledger.LockAllArgs(wait, locks))
		return f, nil
	}
	var asked error
	if !a.op.Locking {
		noting := a.noting()
		ledger.QueueAll(&f.batch, noting)
		f.reads = append(f.reads, reading{all: func(r pgx.BatchResults) error {
			asked = ledger.ReadAll(r, noting, func(err error) error { return failed("open", err) })
			return asked
		}})
	}
	if err := send(ctx, t, f); err != nil {
		return nil, cmp.Or(t.aborted(err), asked, ledger.Unprepared(a.queries, err), failed("open", err))
	}
	*begun = true
	f = &flush{}
	if a.op.Locking {
		return f, a.ask(ctx, t, ledger.LockAllArgs(wait, locks), "open")
	}
	a.again(f, ledger.LockAllArgs(wait, locks))
	return f, nil
}

// Judged is StepOf of a call whose refusals are answers, and leave the transaction usable.
func Judged[R any](call *ledger.Call[R], refusal *error, answered func(R)) Step {
	scan := call.Scan
	judged := *call
	judged.Scan = func(row pgx.Row) (R, error) {
		read := &readRow{Row: row}
		answer, err := scan(read)
		if read.err != nil {
			return answer, err
		}
		if *refusal = err; err == nil {
			answered(answer)
		}
		return answer, nil
	}
	return StepOf(&judged, nil)
}

// readRow notes an error of reading the row, which is not an answer of the row.
type readRow struct {
	pgx.Row
	err error
}

func (r *readRow) Scan(dest ...any) error {
	r.err = r.Row.Scan(dest...)
	return r.err
}

// next sends the next flush, which may be the first.
func next(ctx context.Context, t transaction, batch *pgx.Batch) pgx.BatchResults {
	if t.tx() == nil {
		return t.send(ctx, batch)
	}
	return answer.SendBatch(ctx, t.tx(), batch)
}

// send sends a flush that does not end the transaction, and reads all of it.
func send(ctx context.Context, t transaction, f *flush) error {
	results := next(ctx, t, &f.batch)
	err := f.read(results)
	return firstOf(err, results.Close())
}

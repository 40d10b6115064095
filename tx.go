package metered

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// Tx is the transaction of a command, as its function sees it: a pgx.Tx for the
// function's own writes, the grant that was spent, and the calls that belong to
// the command. It is dead once the function returns, and is not for use by several
// goroutines at once, as a pgx.Tx is not.
//
// It cannot be committed or rolled back: Commit, Rollback and statements to that
// effect are ErrTxControl, and the server refuses a COMMIT that comes another way.
// Begin and savepoints work, inside it. Conn is the bare connection, for its type
// map and the like, and not for statements: a ROLLBACK sent there ends the
// transaction, and CLOSE ALL closes the cursor that makes the server refuse a COMMIT. All
// that Do can do then is to say so (ErrTxControl).
type Tx struct {
	guarded

	// Grant is what the command's token granted; nil without Command.Token.
	Grant *tokens.Grant

	// Sticky is what was charged for Command.Sticky, with the standings after it:
	// how many attempts are left, also for a function that goes on to fail. It stays
	// charged whatever the function returns, and is the same in each retry.
	Sticky budget.Receipt

	bare    pgx.Tx
	done    *atomic.Bool // the function has returned
	client  *Client
	op      *operation
	charges []budget.Charge
	call    *charging
	entries []*entryCall
	holds   []*holdsCall
}

// guarded is embedded under a name that is not exported.
type guarded = guardtx.Tx

func (c *Client) newTx(op *operation, tx pgx.Tx, grant *tokens.Grant) *Tx {
	done := new(atomic.Bool)
	return &Tx{
		guarded: guardtx.New(tx, done), bare: tx, done: done,
		Grant: grant, Sticky: op.stickyReceipt, client: c, op: op,
		charges: slices.Clone(op.command.Charges), call: op.charges,
	}
}

// run calls the command's function. The transaction is dead afterwards, also if the
// function panics: its connection then serves others.
func (t *Tx) run(ctx context.Context, do work) ([]byte, error) {
	defer t.done.Store(true)
	return do(context.WithValue(ctx, inside{t.client}, true), t)
}

// inside is the key of a context in which a command of the client runs.
type inside struct{ client *Client }

// Charge adds charges to those of the command, once their amounts are known. They
// are made last, with the others, all or none; charges of one scope are added up.
// Nothing is sent now: a denial is the error of Do, after the function has returned. The
// error is a *budget.ArgumentError, or ErrTxDone.
//
// Charges made here are not part of the fingerprint.
func (t *Tx) Charge(charges ...budget.Charge) error {
	if t.over() {
		return ErrTxDone
	}
	all := append(slices.Clone(t.charges), charges...)
	call, err := prepareCharges(t.client.Budget, all...)
	if err != nil {
		return err
	}
	t.charges, t.call = all, call
	return nil
}

// Credit is budget.Ledger.Credit as part of the command, whose id keeps it from being
// done twice. It is made in the last flush, all or none, before the command's holds and
// charges, which can spend what it gives. Nothing is sent now. With a charge of another
// scope it is a transfer: all locks are taken in one order, so that two transfers in
// opposite directions do not deadlock. The error is a *budget.ArgumentError, or ErrTxDone.
//
// Credits made here are not part of the fingerprint, and not in Outcome.Receipt; their
// ledger entries name the command. budget.Ledger.Credit with tx would lock its scope at
// once, before those of the charges.
func (t *Tx) Credit(credits ...budget.Credit) error {
	return prepareEntries(t, prepareCredit, credits)
}

// RefundCharge is budget.Ledger.Refund as part of the command, as Credit is. A refusal
// (budget.ErrRefundExceeds, …) is the error of Do, after the function has returned. To give
// back captured holds, see Refund.
func (t *Tx) RefundCharge(refunds ...budget.Refund) error {
	return prepareEntries(t, prepareRefund, refunds)
}

func prepareEntries[E any](t *Tx, prepare func(*budget.Ledger, E) (*entryCall, error), entries []E) error {
	if t.over() {
		return ErrTxDone
	}
	all := slices.Clone(t.entries)
	for _, e := range entries {
		p, err := prepare(t.client.Budget, e)
		if err != nil {
			return err
		}
		all = append(all, p)
	}
	t.entries = all
	return nil
}

// Enqueue is jobs.Enqueuer.Enqueue in the command's transaction. Workers see the
// job when the command has committed.
func (t *Tx) Enqueue(ctx context.Context, args river.JobArgs, opts *jobs.Options) (jobs.Result, error) {
	switch {
	case t.over():
		return jobs.Result{}, ErrTxDone
	case t.client.Jobs == nil:
		return jobs.Result{}, ErrNoRiver
	}
	return t.client.Jobs.Enqueue(ctx, t, args, opts)
}

// Secret derives the secret of a token that the command mints, for tokens.Mint.
// See Client.Secret, which gives the same for a replay.
func (t *Tx) Secret(label string) (tokens.Secret, error) {
	if t.client == nil {
		return tokens.Secret{}, ErrTxDone
	}
	return t.client.Secret(t.op.command.Namespace, t.op.command.ID, label)
}

// over reports whether the function has returned. The zero value was never begun.
func (t *Tx) over() bool { return t.done == nil || t.done.Load() }

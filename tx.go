package metered

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
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

	client  *Client
	op      *operation
	charges []budget.Charge
	call    *charging
	entries []*entryCall
	holds   []*holdsCall
}

func (c *Client) newTx(op *operation, tx pgx.Tx, grant *tokens.Grant) *Tx {
	return &Tx{
		guarded: guarded{bareTx: tx, done: new(atomic.Bool)},
		Grant:   grant, Sticky: op.stickyReceipt, client: c, op: op,
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

// Commit is ErrTxControl.
func (t *Tx) Commit(context.Context) error { return ErrTxControl }

// Rollback is ErrTxControl. Return an error from the function instead.
func (t *Tx) Rollback(context.Context) error { return ErrTxControl }

// guarded is a pgx.Tx that refuses to end the transaction it belongs to. Commit
// and Rollback are those of Tx, or of a savepoint.
type guarded struct {
	bareTx
	done *atomic.Bool
}

// bareTx is embedded under a name that is not exported: nobody is to reach around.
type bareTx = pgx.Tx

// check refuses a statement before it is sent.
func (g guarded) check(sql string) error {
	if err := g.alive(); err != nil {
		return err
	}
	conn := g.bareTx.Conn()
	backslashes := conn != nil && conn.PgConn().ParameterStatus("standard_conforming_strings") == "off"
	if controlsTransaction(sql, backslashes) {
		return fmt.Errorf("%w: one of its statements would, or a quote or a comment is left open", ErrTxControl)
	}
	return nil
}

// options has the rewriters among pgx's options, which come before the arguments,
// checked for what they make of the statement.
func (g guarded) options(args []any) []any {
	for i, arg := range args {
		switch arg := arg.(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
			continue
		case pgx.QueryRewriter:
			args = slices.Clone(args)
			args[i] = rewriter{arg, g}
			continue
		}
		break
	}
	return args
}

type rewriter struct {
	pgx.QueryRewriter
	g guarded
}

func (r rewriter) RewriteQuery(ctx context.Context, conn *pgx.Conn, sql string, args []any) (string, []any, error) {
	sql, args, err := r.QueryRewriter.RewriteQuery(ctx, conn, sql, args)
	if err == nil {
		err = r.g.check(sql)
	}
	return sql, args, err
}

// over reports whether the function has returned. The zero value was never begun.
func (g guarded) over() bool { return g.done == nil || g.done.Load() }

func (g guarded) alive() error {
	if g.over() {
		return ErrTxDone
	}
	if conn := g.bareTx.Conn(); conn != nil && conn.PgConn().TxStatus() == 'I' {
		// Ended behind our back: what is sent now would be committed on its own.
		return fmt.Errorf("%w: it has ended", ErrTxControl)
	}
	return nil
}

// Begin sets a savepoint, as pgx does.
func (g guarded) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := g.alive(); err != nil {
		return nil, err
	}
	tx, err := g.bareTx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return savepoint{guarded{bareTx: tx, done: g.done}}, nil
}

// savepoint is a nested transaction of the function's, which it may end.
type savepoint struct{ guarded }

func (s savepoint) Commit(ctx context.Context) error {
	if err := s.alive(); err != nil {
		return err
	}
	return s.bareTx.Commit(ctx)
}

func (s savepoint) Rollback(ctx context.Context) error {
	if err := s.alive(); err != nil {
		return err
	}
	return s.bareTx.Rollback(ctx)
}

func (g guarded) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := g.check(sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	return g.bareTx.Exec(ctx, sql, g.options(args)...)
}

func (g guarded) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := g.check(sql); err != nil {
		return failedRows{err}, err
	}
	return g.bareTx.Query(ctx, sql, g.options(args)...)
}

func (g guarded) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := g.check(sql); err != nil {
		return failedRows{err}
	}
	return g.bareTx.QueryRow(ctx, sql, g.options(args)...)
}

func (g guarded) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	for _, q := range b.QueuedQueries {
		if err := g.check(q.SQL); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
		q.Arguments = g.options(q.Arguments)
	}
	return g.bareTx.SendBatch(ctx, b)
}

func (g guarded) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := g.check(sql); err != nil {
		return nil, err
	}
	return g.bareTx.Prepare(ctx, name, sql)
}

func (g guarded) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if err := g.alive(); err != nil {
		return 0, err
	}
	return g.bareTx.CopyFrom(ctx, table, columns, src)
}

// LargeObjects are those of a closed transaction once this one is over.
func (g guarded) LargeObjects() pgx.LargeObjects {
	if err := g.alive(); err != nil {
		b := &pgx.Batch{}
		b.BeginTx(pgx.TxOptions{})
		return pgx.FailedBatchResults(b, err).Tx().LargeObjects()
	}
	return g.bareTx.LargeObjects()
}

// failedRows are the rows of a query that was not sent.
type failedRows struct{ err error }

func (r failedRows) Close()                                       {}
func (r failedRows) Err() error                                   { return r.err }
func (r failedRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r failedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r failedRows) Next() bool                                   { return false }
func (r failedRows) Scan(...any) error                            { return r.err }
func (r failedRows) Values() ([]any, error)                       { return nil, r.err }
func (r failedRows) RawValues() [][]byte                          { return nil }
func (r failedRows) Conn() *pgx.Conn                              { return nil }
func (r failedRows) TypeMap() *pgtype.Map                         { return nil }

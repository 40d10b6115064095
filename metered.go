// Package metered runs metered commands on Postgres: a command charges budgets, spends a one-time grant, does the
// caller's own writes and enqueues jobs, and all of it commits or none of it does.
//
//	out, err := metered.Do(ctx, client, metered.Command{
//	    ID:        requestID,                     // the same id never runs twice
//	    Namespace: user,                          // whose id it is: the user who is signed in
//	    Name:      "upload",
//	    Input:     input,
//	    Token:     &metered.Redeem{Purpose: "upload", Subject: user, Presented: token},
//	    Charges:   []budget.Charge{{Scope: "org/acme", Amount: size, Limits: limits}},
//	}, func(ctx context.Context, tx *metered.Tx) (Stored, error) {
//	    … your writes through tx, tx.Grant, tx.Enqueue(ctx, ProcessUpload{…}, nil) …
//	    return stored, nil
//	})
//
// Most programs want [Do], which owns its transaction. [DoTx] runs the same command inside one of yours. [Open] is for
// work whose cost is known at its end: a stream, an agent's call. Prepaid credit that expires is package wallet. It and
// budget, holds, leases, tokens and jobs also work alone. docs/model.md shows a command on one page.
//
// Limits can have thresholds: Config.OnThreshold gets the charge that crosses one, before it commits.
//
// Charges are made last, in the flush that carries COMMIT. So a command can be refused after its function has run: the
// function must have no effect outside the transaction.
//
// A nil error means committed. After an *IndefiniteError nobody knows: call again with the same command. Any other
// error means that nothing was written, except sticky charges and a recorded refusal. Retryable says which errors are
// worth another call.
package metered

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/jsontext"
	"github.com/pgmetered/metered/internal/uuidv7"
	"github.com/pgmetered/metered/observe"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/wallet"
)

// NewID returns a UUIDv7 for Command.ID. Make it at the client, and send it again with each repetition.
func NewID() string { return uuidv7.New() }

// Func is the body of a command: its writes, through tx, and its result, which is stored as JSON (else ErrResult). It
// may be called several times, and must have no effect outside the transaction.
//
// Do inside it, with its ctx or one made from it, is ErrNested, also with context.WithoutCancel. Work that goes on
// after the command needs a context from elsewhere.
type Func[R any] func(ctx context.Context, tx *Tx) (R, error)

// Outcome is the answer of a committed command. On error every field except Sticky is zero, and of a refusal on record also
// Replayed and At are set.
type Outcome[R any] struct {
	Result R               `json:"result"` // the function's result, as it comes back from JSON
	Raw    json.RawMessage `json:"-"`      // that JSON, the same bytes for each replay
	// Replayed is true if this is the record of an earlier call, or of this one after the answer to COMMIT was lost.
	Replayed bool           `json:"replayed"`
	Receipt  budget.Receipt `json:"receipt"` // the charges, without sticky ones. A replay has no standings
	// Sticky has the charges of this call for Command.Sticky, also on error. It is empty if the charges were refused, are
	// not known to be taken (ErrSticky), or if this call found the record of another.
	Sticky budget.Receipt `json:"sticky,omitzero"`
	// Holds are the holds of the calls of Tx, in their order, each as it was after its call, also in a replay.
	Holds []holds.Hold   `json:"holds,omitempty"`
	Draws []wallet.Drawn `json:"draws,omitempty"` // by the calls of Tx.Draw, in their order, also in a replay
	At    time.Time      `json:"at"`              // when the command was completed, by the database's clock
	LSN   replica.LSN    `json:"lsn,omitzero"`    // behind the commit, if Command.LSN is set, or 0 if the server did not say
}

// Do runs a command as one unit: it claims the operation id, spends the token, calls fn (which may be nil) with the
// transaction, makes the charges, records the result and commits. If a part fails, nothing is left, except sticky
// charges.
//
// Idempotency: a command that committed under the same ID and Namespace gets its first result, without running again.
// its token must be presented, but may be spent. Concurrent calls with one id wait for each other. A refused command
// leaves no record, unless RecordRefusal asks for one. A failed one leaves none.
//
// Retries: SQLSTATE 40001 and 40P01, up to Config.MaxAttempts attempts, and a COMMIT whose answer was lost, until
// ctx's deadline or Config.ResolveTimeout.
//
// Locks: the operation id and the token's row from the beginning, those of fn, and in the last flush the scopes,
// new ids of holds and rows of holds, in one order. ctx's deadline also bounds the server's waits.
//
// Errors: *ArgumentError before any SQL, refusals (see Denial), ErrConflict, ErrRetired, ErrFuture, those of the
// section "Failures of a command", ErrNotMigrated, ErrSchemaVersion, fn's own, errors of Postgres, *IndefiniteError. A
// panic in fn rolls back and goes on. On error the Outcome is as its comment says.
func Do[R any](ctx context.Context, c *Client, cmd Command, fn Func[R]) (Outcome[R], error) {
	if err := c.made(); err != nil {
		return Outcome[R]{}, err
	}
	if c.engine.Inside(ctx) {
		return Outcome[R]{}, ErrNested
	}
	return run(ctx, c, nil, cmd, fn)
}

// DoTx runs a command inside the caller's transaction, behind a savepoint: if it is refused or fails, tx is as before,
// and usable. It takes effect with the caller's commit. A rollback takes its record back too.
//
// The scopes stay locked until tx ends: make it the last thing. A second command in tx, or one after a charge, can
// deadlock (40P01). Nothing is retried, and no timeout is set: after 40001 or 40P01 the caller retries tx
// (Client.RunTx). Sticky, Isolation, EarlyRelease, RecordRefusal and LSN are refused. After a replay or ErrConflict the
// caller's commit waits until that record is durable. Otherwise as Do.
func DoTx[R any](ctx context.Context, c *Client, tx pgx.Tx, cmd Command, fn Func[R]) (Outcome[R], error) {
	if err := cmp.Or(c.made(), notNil("tx", tx)); err != nil {
		return Outcome[R]{}, err
	}
	switch {
	case len(cmd.Sticky) > 0:
		return Outcome[R]{}, misuse("Command.Sticky", "cannot be taken from inside a transaction: use Do")
	case cmd.Isolation != "":
		return Outcome[R]{}, misuse("Command.Isolation", "is the caller's, who began the transaction")
	case cmd.EarlyRelease:
		return Outcome[R]{}, misuse("Command.EarlyRelease", "is about a COMMIT, which is the caller's: use Do")
	case cmd.RecordRefusal:
		return Outcome[R]{}, misuse("Command.RecordRefusal", "needs a transaction of its own: use Do")
	case cmd.LSN:
		return Outcome[R]{}, misuse("Command.LSN", "is that of a COMMIT, which is the caller's: use replica.CommitLSN after it")
	}
	return run(ctx, c, tx, cmd, fn)
}

// run runs a command in tx, or in a transaction of its own if that is nil.
func run[R any](ctx context.Context, c *Client, tx pgx.Tx, cmd Command, fn Func[R]) (out Outcome[R], err error) {
	var op *operation
	ctx, span := c.observer.Start(ctx, observe.Op{Work: observe.Command, Name: cmd.Name, Namespace: cmd.Namespace, ID: cmd.ID})
	returned := false // else the function panics
	defer func() { c.ended(ctx, span, op, tx != nil, returned, err) }()
	op, err = c.prepare(cmd, encoded(fn, &out.Result))
	if err == nil {
		err = op.run(ctx, tx)
		c.check.Doubt(err)
	}
	if err == nil && op.rec.Replayed {
		var first R
		if err = json.Unmarshal(op.rec.Result, &first); err != nil {
			err = fmt.Errorf("%w: the recorded result does not fit its type: %w", ErrResult, err)
		}
		out.Result = first
	}
	returned = true
	if err != nil {
		out = Outcome[R]{Sticky: op.taken()}
		if op != nil && op.rec.Refusal != nil {
			out.Replayed, out.At = true, op.rec.At
		}
		return out, c.deny(ctx, cmd, op, err)
	}
	out.Raw, out.Replayed, out.At, out.LSN = op.rec.Result, op.rec.Replayed, op.rec.At, op.rec.LSN
	out.Receipt, out.Sticky, out.Holds, out.Draws = op.receipt, op.sticky, op.holds, op.draws
	return out, nil
}

// work is a Func with its result as JSON.
type work func(ctx context.Context, tx *Tx) ([]byte, error)

// encoded runs fn and its result through JSON and back before anything commits, so
// that a result which cannot be replayed is refused the first time.
func encoded[R any](fn Func[R], result *R) work {
	return func(ctx context.Context, tx *Tx) ([]byte, error) {
		var r R
		if fn != nil {
			var err error
			if r, err = fn(ctx, tx); err != nil {
				return nil, err
			}
		}
		raw, err := json.Marshal(r)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrResult, err)
		}
		if len(raw) > maxResultBytes {
			return nil, fmt.Errorf("%w: %d bytes, want at most %d", ErrResult, len(raw), maxResultBytes)
		}
		if err := jsontext.Check(r, raw); err != nil {
			return nil, fmt.Errorf("%w: it %w", ErrResult, err)
		}
		var back R
		if err := json.Unmarshal(raw, &back); err != nil {
			return nil, fmt.Errorf("%w: it does not come back from JSON: %w", ErrResult, err)
		}
		*result = back
		return raw, nil
	}
}

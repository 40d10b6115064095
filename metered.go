// Package metered runs metered commands on Postgres: a command charges budgets,
// spends a one-time grant, does the caller's own writes and enqueues durable work,
// and all of it commits or none of it does.
//
//	out, err := metered.Do(ctx, client, metered.Command{
//	    ID:        requestID,                     // the same id never runs twice
//	    Namespace: user,                          // whose id it is: who is signed in
//	    Name:      "upload",
//	    Input:     input,
//	    Token:     &metered.Redeem{Purpose: "upload", Subject: user, Presented: token},
//	    Charges:   []budget.Charge{{Scope: "org/acme", Amount: size, Limits: limits}},
//	}, func(ctx context.Context, tx *metered.Tx) (Stored, error) {
//	    … your writes through tx, tx.Grant, tx.Enqueue(ctx, ProcessUpload{…}, nil) …
//	    return stored, nil
//	})
//
// Do owns its transaction; DoTx runs the same command inside one of yours. The
// pieces can be used alone, each in a transaction of yours: packages budget, holds,
// tokens and jobs.
//
// # The order of things
//
// A scope's lock is held until COMMIT, so charges come last:
//
//	flush 1      BEGIN, claim the id, spend the token, a first look at the budget
//	function     your writes and jobs
//	last flush   credits (Tx.Credit), holds (Tx.Place, …), charges, operation record, COMMIT
//
// The first look takes no lock and refuses hopeless commands before they work; a charge
// that the function itself makes room for belongs in Tx.Charge, which is not looked at.
// The charge in the last flush is the one that counts: it can refuse after the
// function has run, and then everything is rolled back. So the function must have
// no effect outside the transaction, and may run more than once.
//
// # Outcomes
//
// Do returns nil: committed. An error that is not an *IndefiniteError: not
// committed, nothing was written (but sticky charges). *IndefiniteError: nobody
// can tell, because the connection was lost while COMMIT was under way and the
// deadline passed before the answer could be looked up. Call Do again with the
// same command: it answers with the first result if there is one. Retryable tells which
// errors are worth another call, Code what they are.
//
// # Where to find what
//
//   - An idempotent endpoint: Do. Inside a transaction of yours: DoTx.
//   - What became of an id: Client.Lookup.
//   - A limit on attempts that also counts those that fail: Command.Sticky.
//   - A top-up, a transfer, a refund: Tx.Credit, Tx.RefundCharge.
//   - A seat, stock, a unique name, held until a deadline: Tx.Place and Tx.Claim, or package
//     holds in a transaction of yours; package holdjobs, to hear of its end.
//   - A job whose cost is known when it is done: package holdjobs.
//   - An audit record, or a counter, of what was refused: Config.OnDenial.
//   - What HTTP says of an error, and RateLimit fields: package httplimit.
//   - Reads of a replica after a write: Command.LSN, and package replica.
//   - Set-up: Migrate or SchemaSQL, GrantSQL; what deletes: Client.PurgeOperations and the
//     Purge of each package.
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
	"github.com/pgmetered/metered/replica"
)

// NewID returns a UUID of version 7 for Command.ID: random, and carrying its time,
// so that it cannot look new again after retention. Make it where the command
// begins, at the client, and send it again with each repetition.
func NewID() string { return uuidv7.New() }

// Func is what a command does: its writes, through tx, and its result, which is
// stored as JSON. A result that encoding/json cannot write, or cannot read back into
// its type, or that has text which is not UTF-8, is ErrResult; that it comes back the same
// is not checked. What JSON leaves out is missing from Outcome.Result, in the first call as
// in a replay.
//
// The function may be called several times, and must have no effect outside the
// transaction, since the command can still be refused after it has returned.
//
// Its ctx says that it is inside a command of the client. Do with that ctx, or with one
// made from it, is ErrNested: it would commit on its own, and wait for a second
// connection while it keeps the first. context.WithoutCancel makes no difference: what
// is to go on after the command needs a context from elsewhere.
type Func[R any] func(ctx context.Context, tx *Tx) (R, error)

// Outcome is what a committed command came to. Beside an error all of it but Sticky is
// zero.
type Outcome[R any] struct {
	// Result is what the function returned, as it comes back from JSON.
	Result R `json:"result"`
	// Raw is that JSON, the same bytes for each replay.
	Raw json.RawMessage `json:"-"`

	// Replayed is true if this is the record of an operation that had committed before, and
	// nothing was done now; and if the answer to this call's own COMMIT was lost, and the
	// record was found afterwards.
	Replayed bool `json:"replayed"`

	// Receipt is what was charged, sticky charges aside. Its entries have no
	// standings in a replay.
	Receipt budget.Receipt `json:"receipt"`

	// Sticky is what this call charged for Command.Sticky, with what is left after it. It is
	// there beside an error too, whatever refused or failed after those charges were
	// taken. It is empty if the call took none: because they were refused themselves,
	// because it is not known whether they were taken (ErrSticky), or because the call found
	// the record of another one.
	Sticky budget.Receipt `json:"sticky,omitzero"`

	// Holds are the holds that the command placed, claimed, captured, extended, released or
	// refunded by its Tx, in the order of these calls, each as it was after its call. They
	// are the same in a replay.
	Holds []holds.Hold `json:"holds,omitempty"`

	// At is when the command was completed, by the database's clock.
	At time.Time `json:"at"`

	// LSN is a place of the log behind the command's commit, if Command.LSN asked
	// for it. It is 0, which replica.ReadAt refuses, if the server did not say: if the connection was
	// lost just behind COMMIT, and no other one was to be had within a second, or if the role
	// may not ask.
	LSN replica.LSN `json:"lsn,omitzero"`
}

// Do runs a command as one unit: claims its operation id, spends its token, calls
// fn with the transaction, makes its charges, records its result and commits. If
// any of it fails, nothing of it is left (but sticky charges). fn may be nil: a
// command that only charges.
//
// Idempotency: a command that has committed under the same ID and Namespace is
// answered with its first result, without running fn, charging, or spending the
// token again. The token has to be presented, since it is part of the command, but may be
// spent, expired or purged by then. Concurrent calls with one id wait for each other. A
// command that failed or was refused leaves no record and may be tried again. A replay and
// ErrConflict are answered when the record they rest on is durable: they wait for the log
// as a commit does.
//
// Retries: serialization failures and deadlocks (SQLSTATE 40001, 40P01) are retried
// whole, up to Config.MaxAttempts attempts in all. After a COMMIT whose answer was lost
// the command is run again, which finds its record if there is one, until the context's
// deadline or Config.ResolveTimeout.
//
// Locks: the operation id's advisory lock from the beginning; the token's row;
// whatever fn locks; and in the last flush, all at once, the locks of the scopes, in the
// order of their keys, then those of the ids of holds that it places, and then the rows of
// holds; until COMMIT is durable, or with Command.EarlyRelease until its record is in the log's
// memory. Two round trips, and those of fn, of which a job without a key is one; one more
// where holds.Config.Subscribers are told, and four for sticky charges.
//
// Timeouts: with a deadline in ctx, the transaction's statement, lock and idle
// timeouts are set to what is left when it begins, less a margin, and the wait for
// scopes to what is left then, so that the server gives up first. While it waits, the
// server looks every 100 ms whether the client is still there
// (client_connection_check_interval), where the platform lets it.
//
// Errors: *ArgumentError, before any SQL; *budget.ExceededError; tokens.ErrInvalid; the
// refusals of what the command does to holds and charges by its Tx (see Denial);
// ErrConflict, ErrRetired, ErrFuture; ErrBusy; ErrTimeout; ErrTxControl, ErrTxFailed,
// ErrResult; ErrSticky; ErrNested; ErrNotMigrated, ErrSchemaVersion; whatever fn returned; errors of Postgres. After all of
// these this call has committed nothing. After an *IndefiniteError that is not known, see
// there. A panic in fn rolls back and goes on. Beside an error the Outcome is zero, but for
// its Sticky: what was charged there stays charged. Retryable tells after which errors the
// same call may succeed.
func Do[R any](ctx context.Context, c *Client, cmd Command, fn Func[R]) (Outcome[R], error) {
	if err := c.made(); err != nil {
		return Outcome[R]{}, err
	}
	if c.engine.Inside(ctx) {
		return Outcome[R]{}, ErrNested
	}
	return run(ctx, c, nil, cmd, fn)
}

// DoTx runs a command inside a transaction of the caller's, between a savepoint
// and its release: if it is refused or fails, tx is as it was before, and usable.
// It takes effect with the caller's commit. If the caller rolls back, so is its record: a
// repetition runs the command again.
//
// The scopes stay locked until tx ends: make it the last thing. A second command in
// tx, or one after a charge, claims its id while scopes are locked, and can deadlock
// with another transaction (40P01). Nothing is retried and no timeout is set, since
// the transaction is not Do's: after SQLSTATE 40001 or 40P01 the caller retries the
// whole of it. If the answer to its COMMIT is lost, the caller finds out by the same command
// again. Command.Sticky, Isolation, EarlyRelease and LSN are refused. After a
// replay or ErrConflict the caller's commit waits until the record they rest on is durable,
// even if tx wrote nothing. Otherwise as Do, with one round trip more if it fails.
func DoTx[R any](ctx context.Context, c *Client, tx pgx.Tx, cmd Command, fn Func[R]) (Outcome[R], error) {
	if err := cmp.Or(c.made(), notNil("tx", tx)); err != nil {
		return Outcome[R]{}, err
	}
	switch {
	case len(cmd.Sticky) > 0:
		return Outcome[R]{}, invalid("Command.Sticky", "cannot be taken from inside a transaction: use Do")
	case cmd.Isolation != "":
		return Outcome[R]{}, invalid("Command.Isolation", "is the caller's, who began the transaction")
	case cmd.EarlyRelease:
		return Outcome[R]{}, invalid("Command.EarlyRelease", "is about a COMMIT, which is the caller's: use Do")
	case cmd.LSN:
		return Outcome[R]{}, invalid("Command.LSN", "is that of a COMMIT, which is the caller's: use replica.CommitLSN after it")
	}
	return run(ctx, c, tx, cmd, fn)
}

// run runs a command in tx, or in a transaction of its own if that is nil.
func run[R any](ctx context.Context, c *Client, tx pgx.Tx, cmd Command, fn Func[R]) (Outcome[R], error) {
	var out Outcome[R]
	op, err := c.prepare(cmd, encoded(fn, &out.Result))
	if err == nil {
		if err := c.check.Usable(ctx, tx != nil); err != nil {
			return Outcome[R]{}, err
		}
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
	if err != nil {
		return Outcome[R]{Sticky: op.taken()}, c.deny(ctx, cmd, op, err)
	}
	out.Raw, out.Replayed, out.At, out.LSN = op.rec.Result, op.rec.Replayed, op.rec.At, op.rec.LSN
	out.Receipt, out.Sticky, out.Holds = op.receipt, op.sticky, op.holds
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

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
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/jsontext"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/replica"
)

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
	if ctx.Value(inside{c}) != nil {
		return Outcome[R]{}, ErrNested
	}
	op, err := c.prepare(cmd)
	if err != nil {
		return Outcome[R]{}, c.deny(ctx, cmd, err, false)
	}
	if err := c.checkSchema(ctx, false); err != nil {
		return Outcome[R]{}, err
	}
	var result R
	rec, err := c.run(ctx, op, encoded(fn, &result))
	c.doubtSchema(err)
	return outcome(rec, result, op.stickyReceipt, err)
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
	op, err := c.prepare(cmd)
	if err != nil {
		return Outcome[R]{}, c.deny(ctx, cmd, err, false)
	}
	if err := c.checkSchema(ctx, true); err != nil {
		return Outcome[R]{}, err
	}
	var result R
	rec, err := c.runIn(ctx, tx, op, encoded(fn, &result))
	c.doubtSchema(err)
	return outcome(rec, result, budget.Receipt{}, c.deny(ctx, cmd, err, false))
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
		if len(raw) > MaxResultBytes {
			return nil, fmt.Errorf("%w: %d bytes, want at most %d", ErrResult, len(raw), MaxResultBytes)
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

func outcome[R any](rec record, result R, sticky budget.Receipt, err error) (Outcome[R], error) {
	if err != nil {
		return Outcome[R]{Sticky: sticky}, err
	}
	if rec.replayed {
		var zero R
		result = zero
		if err := json.Unmarshal(rec.raw, &result); err != nil {
			return Outcome[R]{Sticky: sticky}, fmt.Errorf("%w: the recorded result does not fit its type: %w", ErrResult, err)
		}
	}
	return Outcome[R]{
		Result: result, Raw: rec.raw, Replayed: rec.replayed, Receipt: rec.receipt, Sticky: sticky, Holds: rec.holds, At: rec.at,
		LSN: rec.lsn,
	}, nil
}

// record is what is remembered of an operation.
type record struct {
	raw      []byte
	replayed bool
	receipt  budget.Receipt
	holds    []holds.Hold
	at       time.Time
	lsn      replica.LSN
}

// run attempts op until there is an answer.
func (c *Client) run(ctx context.Context, op *operation, do work) (record, error) {
	var lost error // a COMMIT whose outcome is open
	resolve := ctx
	for n := 1; ; n++ {
		a := c.attempt(resolve, op, do)
		if a.err == nil {
			if op.command.LSN && a.rec.lsn == 0 {
				a.rec.lsn = c.lsn(ctx)
			}
			return a.rec, nil
		}
		if a.claimed {
			lost = nil // the claim was granted, so the lost transaction is over, without a record
		}
		switch {
		case a.unknown:
			lost = a.err
			if _, ok := resolve.Deadline(); !ok {
				var cancel context.CancelFunc
				resolve, cancel = context.WithTimeout(ctx, c.cfg.ResolveTimeout)
				defer cancel()
			}
		case lost != nil: // not through to the answer yet: try on
		case sqlstate.Collided(a.err) && n < c.cfg.MaxAttempts:
		case sqlstate.Collided(a.err):
			return record{}, fmt.Errorf("metered: gave up after %d attempts: %w", n, a.err)
		default:
			return record{}, c.deny(ctx, op.command, timedOut(resolve, a.err), a.sticky)
		}
		if err := pause.Before(resolve, n); err != nil {
			if lost != nil {
				return record{}, &IndefiniteError{Namespace: op.command.Namespace, ID: op.command.ID, cause: lost}
			}
			return record{}, timedOut(resolve, fmt.Errorf("metered: %w, while retrying: %w", err, a.err))
		}
	}
}

// lsn is asked for on another connection, or 0: the command has committed, whatever
// becomes of this, and has waited long enough.
func (c *Client) lsn(ctx context.Context) replica.LSN {
	ctx, cancel := context.WithTimeout(ctx, lsnTimeout)
	defer cancel()
	p, _ := replica.CommitLSN(ctx, c.pool)
	return p
}

// lsnTimeout bounds asking a primary for the LSN after the commit.
const lsnTimeout = time.Second

// deny tells Config.OnDenial of err if it is a refusal, and returns err.
func (c *Client) deny(ctx context.Context, cmd Command, err error, sticky bool) error {
	if c.cfg.OnDenial != nil && fault.Refused(err) {
		cmd.Token = nil
		c.cfg.OnDenial(ctx, Denial{Command: cmd, Err: err, Sticky: sticky})
	}
	return err
}

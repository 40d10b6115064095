// Package command is the engine of metered.Do and metered.DoTx: it claims an operation id, runs the
// command's function, does the command's steps, records the operation, and ends the transaction. It
// imports neither budget nor holds: their calls come as types of package ledger and as steps.
package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/replica"
)

// Config is the part of metered.Config that the engine needs.
type Config struct {
	Schema                                 schema.Name
	LockTimeout, MaxFuture, ResolveTimeout time.Duration
	MaxAttempts                            int
	Observer                               *observed.To
	// Usable refuses operations on a schema that they cannot succeed on, before they begin on the
	// connection. nil refuses none.
	Usable func(ctx context.Context, db schema.DB) error
}

// Engine runs commands on a pool.
type Engine struct {
	pool   *pgxpool.Pool
	cfg    Config
	sql    statements
	places chan struct{} // one for each attempt of an operation with a First
	turns  *turns
	pins   bool // transactions begin with answer.PinSQL
	future any  // cfg.MaxFuture, as an argument

	answers answers // of the queries of limits

	functions atomic.Int32 // of operations that run
}

type statements struct{ begin, beginPlain, tokenPlain, complete, completePlain, completeTotal, runPlain, runTotal, run, finish, newest, lockAll string }

// New returns an Engine.
func New(pool *pgxpool.Pool, cfg Config) *Engine {
	n := cfg.Schema
	if cfg.Usable == nil {
		cfg.Usable = func(context.Context, schema.DB) error { return nil }
	}
	return &Engine{pool: pool, cfg: cfg, places: places(pool), turns: newTurns(), pins: answer.Textual(pool), future: cfg.MaxFuture, sql: statements{
		begin: n.SQL(beginSQL), beginPlain: n.SQL(beginPlainSQL), tokenPlain: n.SQL(tokenPlainSQL), complete: n.SQL(completeSQL), completePlain: n.SQL(completePlainSQL), completeTotal: n.SQL(completeTotalSQL),
		runPlain: n.SQL(runPlainSQL), runTotal: n.SQL(runTotalSQL), run: n.SQL(runSQL), finish: n.SQL(finishSQL), newest: n.SQL(newestSQL), lockAll: n.SQL(ledger.LockAllSQL),
	}}
}

// TakesFirst reports whether an operation may have a First, which needs a second connection.
func (e *Engine) TakesFirst() bool { return cap(e.places) > 0 }

// inside is the key of a context in which an operation of the engine runs.
type inside struct{ engine *Engine }

// Inside reports whether ctx is that of the function, or of a subscriber, of an operation.
func (e *Engine) Inside(ctx context.Context) bool { return ctx.Value(inside{e}) != nil }

// Operation is a validated command.
type Operation struct {
	Tenant, ID  string
	Name        string
	Key         int64 // of the claim's advisory lock
	IssuedAt    *time.Time
	Fingerprint []byte

	Token   ledger.PresentedToken           // without a digest there is none
	Granted func(row ledger.TokenRow) error // judges the answer about the token
	Charges *ledger.Charging                // for a first look, nil for none
	Looking func()                          // called before that look, nil for none
	Holds   []*ledger.Placing               // for a first look
	Newest  *Event                          // that the operation is, nil for none

	// Enter is the statement that comes first in each transaction of the operation, with its
	// longest wait for locks. nil for none.
	Enter func(waitMS int32) Statement

	// First is called once, when the id is claimed and is no replay, before the token and the
	// charges are looked at. It uses a connection of its own. nil for none.
	First func(context.Context) error

	// Bare says that Function does nothing with its transaction, which may be nil.
	Bare bool

	// Statements are sent before Function is called, in each attempt. They are nil for most.
	Statements []*pgx.QueuedQuery

	// Function is called in each attempt.
	Function func(context.Context, pgx.Tx) (Ending, error)
	Failed   bool // the error of the last attempt is Function's
	Telling  bool // an attempt met a threshold: from then on charges are made, and reported, before COMMIT is sent
	Asking   bool // limits are asked for anew, since one was not as it had been
	Locking  bool // the locks are taken before limits are asked for, since a query locks rows, or was answered otherwise under them

	Attempts, RoundTrips int // so far, for the observer

	// Of Do and Once alone.
	Isolation         pgx.TxIsoLevel
	EarlyRelease, LSN bool
	Until             time.Time // until then transient errors are tried again. Zero for none
}

// forget drops the answers of an earlier attempt: the first look leaves limits out that a query has
// yet to answer.
func (op *Operation) forget() {
	if op.Looking != nil {
		op.Looking()
	}
	if op.Charges != nil {
		for _, q := range op.Charges.Queries {
			q.Forget()
		}
	}
	for _, h := range op.Holds {
		for _, q := range h.Queries {
			q.Forget()
		}
	}
}

// Refused is op after a refusal, with the refusal as JSON: it records the refusal, unless there is
// a record by now.
func (op *Operation) Refused(reason string) *Operation {
	return &Operation{
		Tenant: op.Tenant, ID: op.ID, Name: op.Name, Key: op.Key, IssuedAt: op.IssuedAt, Fingerprint: op.Fingerprint, Isolation: pgx.ReadCommitted,
		Enter:    op.Enter,
		Function: func(context.Context, pgx.Tx) (Ending, error) { return Ending{Result: []byte{}, Refusal: &reason}, nil },
	}
}

// Ending is the rest of an operation after its function: result, steps, charges, and all that is
// written at its end.
type Ending struct {
	Result  []byte           // JSON
	Steps   []Step           // in this order, before the charges
	Charges *ledger.Charging // nil for none
	Refusal *string          // JSON: of an operation that was refused, with an empty Result and nothing to do
	Notice  *Statement       // sent before the steps, nil for none
	Jobs    []int64          // that the function made, for the record
}

// Event is an operation's place among those of its key. After a newer one it is ErrStale.
type Event struct {
	Key string
	At  time.Time
}

// Statement is a statement without an answer.
type Statement struct {
	SQL  string
	Args []any
}

// Record is the stored record of an operation.
type Record struct {
	Result   []byte
	Replayed bool
	At       time.Time
	LSN      replica.LSN

	// The charges: in a replay without Used and Held, but with Scopes and Amounts.
	ledger.Answer
	Scopes  []string
	Amounts []int64
	Holds   []string // in a replay, as JSON
	Refusal []byte   // Ending.Refusal, in a replay
}

// Indefinite is the error of an operation whose COMMIT may or may not have taken effect.
type Indefinite struct{ Cause error }

func (e *Indefinite) Error() string { return e.Cause.Error() }

// Unwrap returns the cause.
func (e *Indefinite) Unwrap() error { return e.Cause }

// Do attempts op until there is an answer. After a COMMIT whose answer was lost the next attempt
// finds out: its claim waits for the lost transaction to end, and then it finds the record, or runs
// op again. Where the server, or a pooler, answered COMMIT by an ERROR that leaves it open, and op
// is not on record, that ERROR is the answer, unless it is a shard's.
func (e *Engine) Do(ctx context.Context, op *Operation) (Record, error) {
	firstDone := false
	rec, err := e.repeat(ctx, op, func(ctx context.Context, lost bool) attempt {
		op.Bare = op.Bare && !lost // the claim alone says that the lost transaction is over
		a := e.attemptOwn(ctx, op, &firstDone)
		e.tell(ctx, lost, &a)
		if a.unknown && a.answered && !sqlstate.OfShard(a.err) {
			op.Function = func(context.Context, pgx.Tx) (Ending, error) { return Ending{}, a.err }
		}
		return a
	})
	if err == nil && op.LSN && rec.LSN == 0 {
		rec.LSN = e.lsn(ctx)
	}
	return rec, err
}

// repeat makes tries until there is an answer. It tries again
//   - after a collision, up to MaxAttempts;
//   - after what is due has been written, where it is more than one call writes;
//   - after a transient error, until op.Until;
//   - on another connection, if the pool's had ended before anything was done on it;
//   - after a COMMIT whose outcome is open (its error is lost), until a try is claimed or answered, or ctx ends, or
//     without a deadline ResolveTimeout is over. An outcome that stays open is *Indefinite, whatever errors followed.
func (e *Engine) repeat(ctx context.Context, op *Operation, try func(ctx context.Context, lost bool) attempt) (Record, error) {
	var lost error // a COMMIT with an open outcome
	var turn func()
	resolve, ended, backlogs := ctx, int32(0), 0
	for n := 1; ; n++ {
		a := try(resolve, lost != nil)
		if a.err == nil {
			return a.rec, nil
		}
		if a.claimed {
			lost = nil // the claim was granted, so the lost transaction is over, without a record
		}
		if scope := sqlstate.Behind(a.err); scope != "" && backlogs < sweep.MaxBacklogs {
			if a.err = sweep.CatchUp(resolve, e.pool, e.cfg.Schema, e.cfg.LockTimeout, scope); a.err == nil {
				backlogs++
				n--
				continue
			}
		}
		switch {
		case a.unknown && a.answered && n >= e.cfg.MaxAttempts: // it is an error that stays
			e.cfg.Observer.Resolved(ctx, observed.Open(ctx))
			return Record{}, &Indefinite{a.err}
		case a.unknown:
			lost = a.err
			if _, ok := resolve.Deadline(); !ok {
				var cancel context.CancelFunc
				resolve, cancel = context.WithTimeout(ctx, max(e.cfg.ResolveTimeout, time.Until(op.Until)))
				defer cancel()
			}
		case a.ended && ended < e.pool.Stat().MaxConns(): // it has no more of these
			ended++
			n--
			continue
		case !op.Telling && ledger.Crossing(a.err): // COMMIT was in the flush of the charge that crosses it
			op.Telling = true
			n--
			continue
		case op.changed(a.err):
			n--
			continue
		case fault.Is(a.err, fault.ErrMoved.Code()): // the lost transaction is over, too, and its record has moved along
			if lost != nil {
				e.cfg.Observer.Resolved(ctx, observed.Open(ctx))
				return Record{}, &Indefinite{a.err}
			}
			return Record{}, a.err
		case lost != nil: // not through to the answer yet: try on
		case sqlstate.Collided(a.err) && n < e.cfg.MaxAttempts:
			e.cfg.Observer.Retried(ctx, a.err)
			if turn == nil {
				turn = e.turns.take(ctx, a.end.turn(), e.cfg.LockTimeout)
				defer turn()
			}
		case time.Now().Before(op.Until) && fault.Retryable(a.err):
		case sqlstate.Collided(a.err):
			return Record{}, gaveUp(n, a.err)
		default:
			return Record{}, timedOut(resolve, a.err)
		}
		if err := pause.Before(resolve, n); err != nil {
			if lost != nil {
				e.cfg.Observer.Resolved(ctx, observed.Open(ctx))
				return Record{}, &Indefinite{lost}
			}
			return Record{}, timedOut(resolve, fmt.Errorf("metered: %w, while retrying: %w", err, a.err))
		}
	}
}

// tell reports to the observer a COMMIT without an answer, or the outcome that this attempt found
// of an earlier one.
func (e *Engine) tell(ctx context.Context, lost bool, a *attempt) {
	to := e.cfg.Observer
	if lost && a.claimed && !(a.found && a.unknown) {
		if lost = false; a.found && (a.err == nil || errors.Is(a.err, fault.ErrUnread)) {
			to.Resolved(ctx, observed.Committed)
		} else {
			to.Resolved(ctx, observed.NotCommitted)
		}
	}
	if !lost && a.unknown {
		to.Lost(ctx, 1)
	}
}

// attemptOwn makes an attempt in a transaction of the engine's own.
func (e *Engine) attemptOwn(ctx context.Context, op *Operation, firstDone *bool) attempt {
	if op.First != nil { // also once it is over: it may wait for an attempt whose First is to come
		select {
		case e.places <- struct{}{}:
			defer func() { <-e.places }()
		case <-ctx.Done():
			return attempt{err: fmt.Errorf("metered: %w", pause.Ended(ctx))}
		}
	}
	conn, err := e.connect(ctx)
	if err != nil {
		return attempt{err: err}
	}
	defer conn.Release()
	a := attempt{err: e.cfg.Usable(ctx, conn)}
	if a.err == nil {
		var whole bool
		if a, whole = e.whole(ctx, op, conn); !whole {
			a = e.attempt(ctx, op, &owned{conn: conn, op: op, pins: e.pins}, firstDone)
		}
	}
	a.judge(ctx, conn)
	commit.Leave(ctx, conn.Conn(), a.err)
	if a.ending && a.err != nil && !a.unknown && conn.Conn().IsClosed() {
		a.err = &fault.Lost{Err: a.err} // without an error of the function
	}
	return a
}

// judge notes whether the attempt's connection is still usable.
func (a *attempt) judge(ctx context.Context, conn *pgxpool.Conn) {
	closed := conn.Conn().IsClosed()
	a.answered = a.unknown && !closed
	a.ended = a.err != nil && !a.begun && closed && ctx.Err() == nil
}

// Again makes tries until one does not collide, up to MaxAttempts. It goes through backlogs.
func (e *Engine) Again(ctx context.Context, try func() error) error {
	endTurn := func() {}
	defer func() { endTurn() }()
	return pause.Loop("metered", func(n int) (again context.Context, _ error) {
		err := sweep.Through(ctx, e.pool, e.cfg.Schema, e.cfg.LockTimeout, try)
		switch {
		case !sqlstate.Collided(err):
			return nil, err
		case n == e.cfg.MaxAttempts:
			return nil, gaveUp(n, err)
		}
		e.cfg.Observer.Retried(ctx, err)
		if n == 1 {
			endTurn = e.turns.take(ctx, 0, e.cfg.LockTimeout)
		}
		return ctx, err
	})
}

// Begin begins a transaction on a connection of the pool, on another one where that had ended
// before.
func (e *Engine) Begin(ctx context.Context, opts pgx.TxOptions) (*pgxpool.Conn, pgx.Tx, error) {
	for ended := int32(0); ; ended++ {
		conn, err := e.connect(ctx)
		if err != nil {
			return nil, nil, err
		}
		tx, err := conn.BeginTx(ctx, opts)
		if err == nil && e.pins {
			_, err = tx.Exec(ctx, answer.PinSQL)
		}
		if err == nil {
			return conn, tx, nil
		}
		again := conn.Conn().IsClosed() && ctx.Err() == nil && ended < e.pool.Stat().MaxConns()
		if conn.Release(); !again {
			return nil, nil, fmt.Errorf("metered: begin: %w", err)
		}
	}
}

// DoTx makes the one attempt of op in tx, a transaction of the caller's, between a savepoint and
// its release. It makes another one where a threshold is to be reported.
func (e *Engine) DoTx(ctx context.Context, tx pgx.Tx, op *Operation) (Record, error) {
	if err := e.cfg.Usable(ctx, tx); err != nil {
		return Record{}, cmp.Or((&lent{}).aborted(err), err)
	}
	var rec Record
	err := ledger.Silently(func(telling bool) error {
		op.Telling = op.Telling || telling
		a := e.attempt(ctx, op, &lent{bare: tx}, new(bool))
		rec = a.rec
		return a.err
	})
	return rec, err
}

// lsnTimeout bounds asking for the LSN after the commit.
const lsnTimeout = time.Second

// lsn asks on another connection. It is 0 on error: the command has committed anyway.
func (e *Engine) lsn(ctx context.Context) replica.LSN {
	ctx, cancel := context.WithTimeout(ctx, lsnTimeout)
	defer cancel()
	lsn, _ := replica.CommitLSN(ctx, e.pool)
	return lsn
}

// maxMargin is how much earlier than the client the server gives up, at most.
const maxMargin = 250 * time.Millisecond

// timeouts are, in ms, how long a wait for a lock may last, and how long the
// server may work on a statement, 0 without a deadline: a little less than ctx has
// left, so that the server gives up first. A client that has given up while its
// COMMIT waits on the server could not take it back.
func (e *Engine) timeouts(ctx context.Context) (wait, statement int32) {
	wait = int32(e.cfg.LockTimeout / time.Millisecond)
	deadline, ok := ctx.Deadline()
	if !ok {
		return wait, 0
	}
	left := time.Until(deadline)
	left -= min(left/10, maxMargin)
	statement = int32(min(max(left/time.Millisecond, 1), 1<<30))
	return min(wait, statement), statement
}

// sent is op as its first and its last statement name it.
func (e *Engine) sent(op *Operation, marker string) ledger.Command {
	return ledger.Command{
		Tenant: op.Tenant, ID: op.ID, Key: op.Key, IssuedAt: op.IssuedAt, MaxFuture: e.cfg.MaxFuture, Marker: marker,
	}
}

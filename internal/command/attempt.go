package command

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/observe"
)

// attempt is one transaction's try at an operation.
type attempt struct {
	rec Record
	err error

	begun   bool // the first flush was answered
	claimed bool // the operation id was claimed
	found   bool // there was a record of it
	ending  bool // the function has returned without an error
	unknown bool // err leaves open whether it committed, durably: the answer to COMMIT was lost

	end      Ending // the rest, once the function has returned
	answered bool   // unknown, and the connection is as good as before: COMMIT was answered
	ended    bool   // the connection had ended before anything was done on it
}

// transaction is where an attempt runs: one that the engine owns, or one that it was lent.
type transaction interface {
	// first queues the statements before the claim.
	first(f *flush)
	// send sends the first flush.
	send(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
	// aborted is the error of a transaction that had failed before the operation began, or nil.
	aborted(err error) error
	// tx is the transaction, once it has begun.
	tx() pgx.Tx
	// settings are the statement timeout that the claim sets, or nil, to set none.
	settings(timeoutMS int32) *int32

	// early queues the statements before the steps.
	early(f *flush)
	// end queues the statements that end the transaction.
	end(batch *pgx.Batch)
	// ended reads their answers, and reports whether an error is foreign: of COMMIT, where deferred
	// triggers of others run.
	ended(results pgx.BatchResults) (foreign bool, err error)
	// outcome judges three errors of the last flush: unread, of an answer that cannot be read, err,
	// of reading it otherwise, and closing, of closing it.
	outcome(ctx context.Context, rec *Record, unread, err, closing error) (unknown bool, _ error)

	// replay ends a transaction that found the record of its operation, and returns when that
	// record is as durable as a commit is. Others may see it earlier: that of an operation with
	// EarlyRelease, and that of any operation whose session was ended while it waited for a
	// synchronous standby.
	replay(ctx context.Context, rec *Record) (unknown bool, _ error)
	// undo takes back a transaction that was not ended, also when ctx is done.
	undo(ctx context.Context)
}

// attempt makes one try at op in t. firstDone: op.First was called before.
func (e *Engine) attempt(ctx context.Context, op *Operation, t transaction, firstDone *bool) (a attempt) {
	defer t.undo(ctx) // on a panic too
	op.Failed = false
	op.Attempts++
	op.forget()
	b, err := e.begin(ctx, op, t, op.First == nil || *firstDone)
	if err != nil {
		found := errors.Is(err, fault.ErrUnread)
		return attempt{err: err, begun: found, claimed: found, found: found}
	}
	a.begun, a.claimed = true, true
	if a.found = b.status == statusReplay; a.found {
		a.rec, a.unknown, a.err = e.replayed(ctx, op, t, b)
		return a
	}
	if op.First != nil && !*firstDone {
		if a.err = op.First(ctx); a.err == nil {
			*firstDone = true
			if op.Token.Digest != nil || op.Charges != nil || len(op.Holds) > 0 || op.Newest != nil {
				a.err = e.open(ctx, op, t, b)
			}
		}
		if a.err != nil {
			return a
		}
	}
	if a.err = b.admit(op); a.err != nil {
		return a
	}
	if len(op.Statements) > 0 {
		if a.err = op.sendStatements(ctx, t.tx()); a.err != nil {
			op.Failed = true
			return a
		}
	}
	call := &called{Context: ctx, engine: e, op: op}
	within, span := e.cfg.Observer.Start(call, observe.Op{Work: observe.Function})
	end, err := e.function(within, call, t, span)
	if err != nil {
		op.Failed, a.err = true, err
		return a
	}
	a.ending, a.end = true, end
	a.rec, a.unknown, a.err = e.finish(call, op, t, end, b.marker)
	return a
}

// replayed ends an attempt that found the record of its operation, which is the answer if it is of
// the same command.
func (e *Engine) replayed(ctx context.Context, op *Operation, t transaction, b *begun) (rec Record, unknown bool, err error) {
	within, span := e.flush(ctx, op, "replay")
	unknown, err = t.replay(within, &b.rec)
	if span.End(err); err != nil {
		return Record{}, unknown, err
	}
	if string(b.fingerprint) != string(op.Fingerprint) {
		return Record{}, false, fmt.Errorf("%w: %q of tenant %q", ErrConflict, op.ID, op.Tenant)
	}
	return b.rec, false, nil
}

// function calls the operation's function, and reports its end to the observer, also a panic. ctx
// is that of the call, or made of it.
func (e *Engine) function(ctx context.Context, call *called, t transaction, span observed.Span) (end Ending, err error) {
	err = ErrPanics
	e.functions.Add(1)
	defer func() {
		e.functions.Add(-1)
		call.over.Store(true)
		span.End(err)
	}()
	end, err = call.op.Function(ctx, t.tx())
	return end, err
}

// flush counts a round trip of op, as it begins.
func (e *Engine) flush(ctx context.Context, op *Operation, name string) (context.Context, observed.Span) {
	op.RoundTrips++
	return e.cfg.Observer.Start(ctx, observe.Op{Work: observe.Flush, Name: name})
}

// The statuses that begin_command answers.
const (
	statusNew     = "new"
	statusReplay  = "replay"
	statusRetired = "retired"
	statusFuture  = "future"
)

const beginSQL = `
select status, fingerprint, result, scopes, amounts, seqs, ats, holds, at, refusal, refused, token_` + ledger.TokenColumns + `
from metered.begin_command($1::bool, $2::bool, $3::metered.new_command, $4::metered.presented_token,
    $5::metered.new_charge[], $6::interval, $7::int)`

// beginPlainSQL claims an operation, the short way.
const beginPlainSQL = `
select metered.begin_command_plain($1::text, $2::text, $3::bigint, $4::timestamptz, $5::interval, $6::int, $7::text, $8::int, $9::bool)`

// tokenPlainSQL spends the token of an operation that the statement before has claimed: a
// repetition waits for no token.
const tokenPlainSQL = `
select case when pg_catalog.current_setting('metered_tx.command', true) operator(pg_catalog.=) $1::text
    then metered.consume_token_plain($2::bytea, $3::text, $4::text, $5::int) end`

// begun is the row that begin_command returned.
type begun struct {
	marker      string
	status      string
	fingerprint []byte
	rec         Record
	stale       error  // a newer event has taken effect
	refused     []byte // of the charges, by the first look
	holdRefused error  // of a hold, by the first look
	token       ledger.TokenRow
}

func (b *begun) scan(row pgx.Row) error {
	r := &b.rec
	var at *time.Time
	err := row.Scan(append([]any{&b.status, &b.fingerprint, &r.Result, &r.Scopes, &r.Amounts, &r.Seqs, &r.Ats, &r.Holds, &at, &r.Refusal, &b.refused},
		b.token.Dest()...)...)
	if r.Replayed = b.status == statusReplay; at != nil {
		r.At = *at
	}
	return err
}

// readClaim reads the answer of begin_command_plain: null for a new id, which is begun.
func (b *begun) readClaim(answer []byte) error {
	if b.status = statusNew; answer == nil {
		return nil
	}
	return b.readPlain(answer)
}

// readToken reads the answer of tokenPlainSQL: null for an id that is not new.
func (b *begun) readToken(row pgx.Row) error {
	var consumed []byte
	err := row.Scan(&consumed)
	if err == nil && consumed != nil {
		b.token = ledger.ConsumedToken(consumed)
	}
	return err
}

// readPlain reads an answer of begin_command_plain that is not null. Another answer has no status.
func (b *begun) readPlain(answer []byte) error {
	b.status = ""
	if len(answer) > 0 && answer[0] == '[' {
		return nil
	}
	var full struct {
		Status      string          `json:"status"`
		Fingerprint []byte          `json:"fingerprint"`
		Result      []byte          `json:"result"`
		Scopes      []string        `json:"scopes"`
		Amounts     []int64         `json:"amounts"`
		Seqs        []int64         `json:"seqs"`
		Ats         []int64         `json:"ats"`
		Holds       []string        `json:"holds"`
		At          int64           `json:"at"`
		Refusal     json.RawMessage `json:"refusal"`
	}
	if err := json.Unmarshal(answer, &full); err != nil {
		return err
	}
	b.status, b.fingerprint = full.Status, full.Fingerprint
	if b.status != statusReplay {
		return nil
	}
	r := &b.rec
	r.Replayed, r.Result, r.Scopes, r.Amounts, r.Seqs = true, full.Result, full.Scopes, full.Amounts, full.Seqs
	r.Ats, r.Holds, r.At = ledger.Moments(full.Ats), full.Holds, time.UnixMicro(full.At)
	if string(full.Refusal) != "null" {
		r.Refusal = full.Refusal
	}
	return nil
}

// begin sends the first flush. First runs between claiming and opening, so an operation that has
// one begins with the claim alone.
func (e *Engine) begin(ctx context.Context, op *Operation, t transaction, opening bool) (*begun, error) {
	b := &begun{marker: newMarker()}
	f := &flush{}
	t.first(f)
	e.enter(ctx, f, op)
	if opening && op.Charges == nil {
		wait, left := e.timeouts(ctx)
		f.json(b.readClaim, e.sql.beginPlain, e.claimArgs(op, t.settings(left), b.marker, wait, false)...)
		if token := op.Token; token.Digest != nil {
			f.row(b.readToken, e.sql.tokenPlain, b.marker, token.Digest, token.Purpose, token.Subject, wait)
		}
	} else {
		f.row(b.scan, e.sql.begin, e.beginArgs(ctx, op, t, b.marker, true, opening)...)
	}
	if opening {
		e.look(ctx, b, f, op)
	}
	within, span := e.flush(ctx, op, "begin")
	results := t.send(within, &f.batch)
	unread, err := f.readAll(results)
	switch err = firstOf(err, results.Close()); {
	case err != nil:
		err = cmp.Or(t.aborted(err), failed("begin", ofCharges(op.Charges, err)))
	case unread != nil && b.status == statusReplay:
		err = fmt.Errorf("%w: %w", fault.ErrUnread, unread)
	case unread != nil:
		err = failed("begin", unread)
	}
	if span.End(err); err != nil {
		return nil, err
	}
	return b, b.standing()
}

// standing is the error of an id that can be neither begun nor replayed.
func (b *begun) standing() error {
	switch b.status {
	case statusNew, statusReplay:
		return nil
	case statusRetired:
		return ErrRetired
	case statusFuture:
		return ErrFuture
	}
	return fmt.Errorf("metered: the schema answers %q, which this build does not know", b.status)
}

// enter queues the statement that comes first.
func (e *Engine) enter(ctx context.Context, f *flush, op *Operation) {
	if op.Enter != nil {
		wait, _ := e.timeouts(ctx)
		s := op.Enter(wait)
		f.exec(s.SQL, s.Args...)
	}
}

// open looks at the token and the charges of an operation that is claimed.
func (e *Engine) open(ctx context.Context, op *Operation, t transaction, b *begun) error {
	f := &flush{}
	f.row(b.scan, e.sql.begin, e.beginArgs(ctx, op, t, b.marker, false, true)...)
	e.look(ctx, b, f, op)
	return e.send(ctx, op, "open", t.tx(), f, op.Charges)
}

// send sends a flush within the transaction, and reads all of it.
func (e *Engine) send(ctx context.Context, op *Operation, name string, tx pgx.Tx, f *flush, charges *ledger.Charging) error {
	ctx, span := e.flush(ctx, op, name)
	results := answer.SendBatch(ctx, tx, &f.batch)
	err := f.read(results)
	if err = firstOf(err, results.Close()); err != nil {
		err = failed(name, ofCharges(charges, err))
	}
	span.End(err)
	return err
}

const newestSQL = `select newest, newest_id from metered.take_newest($1::text, $2::text, $3::timestamptz, $4::text, $5::int)`

// look makes op the newest event of its key, if it is one, and asks whether its holds would be
// refused.
func (e *Engine) look(ctx context.Context, b *begun, f *flush, op *Operation) {
	if op.Newest != nil {
		wait, _ := e.timeouts(ctx)
		f.row(func(row pgx.Row) error {
			var newest *time.Time
			var id *string
			err := row.Scan(&newest, &id)
			if newest != nil && id != nil {
				b.stale = fmt.Errorf("%w: for %q, that of %s with the id %q", ErrStale, op.Newest.Key, newest.UTC().Format(time.RFC3339Nano), *id)
			}
			return err
		}, e.sql.newest, op.Tenant, op.Newest.Key, op.Newest.At, op.ID, wait)
	}
	for _, h := range op.Holds {
		f.row(func(row pgx.Row) error {
			refusal, err := h.Looked(row)
			b.holdRefused = cmp.Or(b.holdRefused, refusal)
			return err
		}, h.LookSQL, h.LookArgs()...)
	}
}

func (e *Engine) beginArgs(ctx context.Context, op *Operation, t transaction, marker string, claiming, opening bool) []any {
	wait, left := e.timeouts(ctx)
	command := e.sent(op, marker)
	command.TimeoutMS = t.settings(left)
	charges, tolerance := sentCharges(op.Charges, false)
	return []any{claiming, opening, command.String(), op.Token.String(), charges, tolerance, wait}
}

// sentCharges are charges as they are sent, which may be none.
func sentCharges(c *ledger.Charging, telling bool) (charges string, tolerance pgtype.Interval) {
	if c == nil {
		return ledger.Charges(nil), toleranceOf(nil)
	}
	return ledger.Summed(ledger.Telling(c.Charges, telling)), c.Tolerance
}

// toleranceOf is the clock tolerance of charges, which may be none.
func toleranceOf(c *ledger.Charging) pgtype.Interval {
	if c == nil {
		return pgtype.Interval{Valid: true}
	}
	return c.Tolerance
}

// admit judges the answers about the event, the token, the budget and the holds, in this order.
func (b *begun) admit(op *Operation) error {
	if b.stale != nil {
		return b.stale
	}
	if op.Token.Digest != nil {
		if err := op.Granted(b.token); err != nil {
			return err
		}
	}
	if len(b.refused) > 0 {
		return op.Charges.Refused(b.refused)
	}
	return b.holdRefused
}

const completeSQL = `
select seqs, ats, used, held, at, periods, crossed
from metered.complete_command($1::metered.new_command, $2::bytea, $3::bytea, $4::json, $5::metered.new_charge[], $6::interval, $7::int, $8::bool)`

// completePlainSQL is completeSQL the short way.
const completePlainSQL = `
select metered.complete_command_plain($1::text, $2::text, $3::text, $4::bytea, $5::timestamptz, $6::bytea, $7::text, $8::bigint[],
    $9::text, $10::bigint, $11::bigint, $12::bigint, $13::interval, $14::timestamptz, $15::timestamptz, $16::jsonb, $17::text,
    $18::bool, $19::interval, $20::int)`

// completeTotalSQL is completePlainSQL for a charge with a limit, and one without.
const completeTotalSQL = `
select metered.complete_command_total($1::text, $2::text, $3::text, $4::bytea, $5::timestamptz, $6::bytea, $7::text, $8::bigint[],
    $9::text, $10::bigint, $11::bigint, $12::bigint, $13::interval, $14::timestamptz, $15::timestamptz, $16::jsonb, $17::text,
    $18::bool, $19::text, $20::bigint, $21::bigint, $22::jsonb, $23::bool, $24::interval, $25::int)`

// finishSQL lets COMMIT pass where complete_command did not, because subscribers come first.
const finishSQL = `select metered.finish_command($1::text)`

// finish sends the last flush: the steps, the charges with the record, and the end of the
// transaction. Subscribers, and OnThreshold for a crossed threshold, are called before the end,
// which then has a flush of its own. Until that one the server refuses a COMMIT, so after an error
// nothing is committed.
func (e *Engine) finish(ctx context.Context, op *Operation, t transaction, end Ending, marker string) (Record, bool, error) {
	tx := t.tx()
	pg := tx.Conn().PgConn()
	if err := guardtx.Intact(ctx, pg); err != nil {
		return Record{}, false, err
	}
	rec := Record{Result: end.Result}
	wait, _ := e.timeouts(ctx)
	queries := end.queries()
	asks, err := e.asks(t, op, queries)
	if err != nil {
		return Record{}, false, err
	}
	if asks != nil && !asks.known {
		within, span := e.flush(ctx, op, "lock")
		err := asks.ask(within, t, ledger.LockAllArgs(wait, end.locks()...), "complete")
		if span.End(err); err == nil {
			err = guardtx.Intact(ctx, pg)
		}
		if err != nil {
			return Record{}, false, err
		}
	}
	telling := op.Telling || slices.ContainsFunc(end.Steps, func(s Step) bool { return s.tell != nil })
	f := &flush{}
	t.early(f)
	if end.Notice != nil {
		f.exec(end.Notice.SQL, end.Notice.Args...)
	}
	if asks != nil {
		asks.again(f, ledger.LockAllArgs(wait, end.locks()...))
	}
	e.queue(ctx, f, op, end, asks != nil, telling)
	e.complete(ctx, f, op, end, &rec, marker, telling)
	last := "complete"
	if telling {
		if err := e.send(ctx, op, last, tx, f, end.Charges); err != nil {
			return Record{}, false, asks.failed(err)
		}
		last = "commit"
		if err := tell(ctx, tx, end, rec.Crossed); err != nil {
			return Record{}, false, foreign("complete", err)
		}
		if err := guardtx.Intact(ctx, pg); err != nil {
			return Record{}, false, err
		}
		f = &flush{}
		f.exec(e.sql.finish, marker)
	}
	t.end(&f.batch)
	ctx, span := e.flush(ctx, op, last)
	results := answer.SendBatch(ctx, tx, &f.batch)
	unread, err := f.readAll(results)
	others := false
	if err == nil {
		others, err = t.ended(results)
	}
	unknown, err := t.outcome(ctx, &rec, unread, err, results.Close())
	switch {
	case err == nil:
		span.End(nil)
		return rec, false, nil
	case others:
		err = foreign("commit", err)
	default:
		err = failed("complete", ofCharges(end.Charges, err))
	}
	if span.End(err); !unknown {
		err = asks.failed(err)
	}
	return Record{}, unknown, err
}

// complete queues the statement that makes the charges and writes the record.
func (e *Engine) complete(ctx context.Context, f *flush, op *Operation, end Ending, rec *Record, marker string, telling bool) {
	wait, _ := e.timeouts(ctx)
	if end.Refusal == nil && !telling {
		args := append(make([]any, 0, mostArgs), op.Tenant, op.ID, marker, op.Fingerprint, op.issued(), end.Result, op.named())
		if len(end.Jobs) > 0 {
			args = append(args, end.Jobs)
		} else {
			args = append(args, nil)
		}
		if sql, args := end.Charges.Short(e.sql.completePlain, e.sql.completeTotal, args, false); sql != "" {
			f.json(func(answer []byte) (err error) {
				rec.At, err = rec.ScanCompleted(answer, end.Charges)
				return err
			}, sql, append(args, toleranceOf(end.Charges), wait)...)
			return
		}
	}
	standing := standings(end.Charges)
	charges, tolerance := sentCharges(end.Charges, telling)
	completed := e.sent(op, marker)
	completed.Standing, completed.Leased = standing, end.Charges.Leased()
	completed.Name, completed.Jobs = op.Name, end.Jobs
	f.row(into(&rec.Seqs, &rec.Ats, &rec.Used, &rec.Held, &rec.At, &rec.Periods, &rec.Crossed), e.sql.complete,
		completed.String(), op.Fingerprint, end.Result, end.Refusal, charges, tolerance, wait, !telling)
}

// tell calls the subscribers of steps, and OnThreshold for the thresholds that steps and charges
// crossed, in a transaction that these cannot end.
func tell(ctx context.Context, tx pgx.Tx, end Ending, crossed []byte) error {
	over := new(atomic.Bool)
	defer over.Store(true)
	lent := guardtx.New(tx, over)
	for _, s := range end.Steps {
		for _, tell := range []func(context.Context, pgx.Tx) error{s.tell, s.cross} {
			if tell != nil {
				if err := tell(ctx, lent); err != nil {
					return err
				}
			}
		}
	}
	if len(crossed) == 0 {
		return nil
	}
	return end.Charges.Cross(ctx, lent, crossed)
}

// newMarker names one attempt's transaction.
func newMarker() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, as of Go 1.24
	return hex.EncodeToString(b[:])
}

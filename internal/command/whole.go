package command

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/ledger"
)

const runPlainSQL = `
select metered.run_command_plain($1::text, $2::text, $3::bigint, $4::bytea, $5::timestamptz, $6::interval, $7::bytea, $8::text,
    $9::text, $10::bigint, $11::bigint, $12::bigint, $13::interval, $14::timestamptz, $15::timestamptz, $16::jsonb, $17::text,
    $18::bool, $19::interval, $20::int)`

// runTotalSQL is runPlainSQL for a charge with a limit, and one without.
const runTotalSQL = `
select metered.run_command_total($1::text, $2::text, $3::bigint, $4::bytea, $5::timestamptz, $6::interval, $7::bytea, $8::text,
    $9::text, $10::bigint, $11::bigint, $12::bigint, $13::interval, $14::timestamptz, $15::timestamptz, $16::jsonb, $17::text,
    $18::bool, $19::text, $20::bigint, $21::bigint, $22::jsonb, $23::bool, $24::interval, $25::int)`

const runSQL = `
select metered.run_command($1::metered.new_command, $2::bytea, $3::bytea, $4::metered.new_charge[], $5::interval, $6::int)`

// whole makes an attempt in one flush, with COMMIT, at an operation that does nothing but its
// statements, steps and charges. whole is false for another operation, and then nothing was done.
func (e *Engine) whole(ctx context.Context, op *Operation, conn *pgxpool.Conn) (a attempt, whole bool) {
	if !op.Bare || op.First != nil || op.Token.Digest != nil || len(op.Holds) > 0 || op.Newest != nil || op.Enter != nil || op.EarlyRelease || op.LSN ||
		op.Telling || op.Isolation != pgx.ReadCommitted && len(op.Statements) == 0 {
		return attempt{}, false
	}
	op.forget()
	end, err := op.Function(ctx, nil)
	tells := func(s Step) bool { return s.tell != nil }
	if err != nil || slices.ContainsFunc(end.Steps, tells) || end.Notice != nil || end.Refusal != nil || len(end.queries()) > 0 {
		return attempt{}, false
	}
	t := &owned{conn: conn, op: op, pins: e.pins}
	if len(op.Statements) > 0 || len(end.Steps) > 0 {
		return e.declared(ctx, op, t, end)
	}
	defer t.undo(ctx)
	op.Failed = false
	op.Attempts++
	a.ending, a.end = true, end

	f, b := &flush{}, &begun{}
	t.first(f)
	wait, _ := e.timeouts(ctx)
	read := func(answer []byte) error { return b.readWhole(answer, end) }
	args := append(make([]any, 0, mostArgs), op.Tenant, op.ID, op.Key, op.Fingerprint, op.issued(), e.future, end.Result, op.named())
	if sql, args := end.Charges.Short(e.sql.runPlain, e.sql.runTotal, args, false); sql != "" {
		f.json(read, sql, append(args, toleranceOf(end.Charges), wait)...)
	} else {
		command := e.sent(op, newMarker())
		command.Standing, command.Leased, command.Name = standings(end.Charges), end.Charges.Leased(), op.Name
		charges, tolerance := sentCharges(end.Charges, false)
		f.json(read, e.sql.run, command.String(), op.Fingerprint, end.Result, charges, tolerance, wait)
	}
	t.end(&f.batch)
	within, span := e.flush(ctx, op, "run")
	results := t.send(within, &f.batch)
	unread, err := f.readAll(results)
	others := false
	if a.begun = err == nil; a.begun {
		others, err = t.ended(results)
	}
	a.unknown, err = t.outcome(ctx, &b.rec, unread, err, results.Close())
	switch {
	case err == nil:
	case others:
		err = foreign("commit", err)
	default:
		err = failed("complete", ofCharges(end.Charges, err))
	}
	if span.End(err); err != nil {
		a.err = err
		return a, true
	}
	a.claimed, a.rec = true, b.rec
	if b.status == statusNew {
		return a, true
	}
	if a.err = b.standing(); a.err == nil {
		a.found = true
		a.rec, a.unknown, a.err = e.replayed(ctx, op, t, b)
	}
	return a, true
}

// readWhole reads the answer of run_command_plain or run_command: that of the claim, or of what came after it.
func (b *begun) readWhole(answer []byte, end Ending) (err error) {
	if err = b.readPlain(answer); err != nil || b.status != "" {
		return err
	}
	b.status = statusNew
	b.rec.Result = end.Result
	b.rec.At, err = b.rec.ScanCompleted(answer, end.Charges)
	return err
}

// standings reports whether charges, which may be none, ask for the standings of their limits.
func standings(c *ledger.Charging) bool { return c != nil && c.Standing }

// mostArgs are the most arguments of a statement of the short way.
const mostArgs = 25

// claimArgs are the arguments of begin_command_plain.
func (e *Engine) claimArgs(op *Operation, timeoutMS *int32, marker string, wait int32, raising bool) []any {
	return []any{op.Tenant, op.ID, op.Key, op.issued(), e.future, timeoutMS, marker, wait, raising}
}

// issued is the time of an operation as it is sent, null for none.
func (op *Operation) issued() any {
	if op.IssuedAt == nil {
		return nil
	}
	return *op.IssuedAt
}

// named is the name of an operation as it is sent, null for none.
func (op *Operation) named() any {
	if op.Name == "" {
		return nil
	}
	return op.Name
}

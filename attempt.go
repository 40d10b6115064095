package metered

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/tokens"
)

// attempt is one transaction's try at a command.
type attempt struct {
	rec record
	err error

	claimed bool // the operation id was claimed
	unknown bool // err leaves open whether it committed, durably
	sticky  bool // err comes from the sticky charges
}

// rollbackTimeout bounds cleaning up, which must also work when ctx is done. A
// connection that is not clean by then is closed, which rolls back as well.
const rollbackTimeout = 5 * time.Second

func (c *Client) attempt(ctx context.Context, op *operation, do work) (a attempt) {
	if op.sticky != nil { // also once they are taken: it may wait for an attempt that has yet to take its own
		select {
		case c.sticky <- struct{}{}:
			defer func() { <-c.sticky }()
		case <-ctx.Done():
			a.err = fmt.Errorf("metered: %w", pause.Ended(ctx))
			return a
		}
	}
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		a.err = fmt.Errorf("metered: connect: %w", err)
		return a
	}
	defer conn.Release()
	// Before Release, also on a panic: the pool destroys a connection that comes
	// back inside a transaction, and a flood of denials would become one of connects.
	defer rollback(ctx, conn)

	b, tx, err := c.begin(ctx, conn, op)
	if err != nil {
		a.err = err
		return a
	}
	a.claimed = true
	if b.status == statusReplay {
		if a.err = endReplay(ctx, conn); a.err != nil {
			a.unknown = true
			return a
		}
		a.rec, a.err = b.replay(op)
		if a.err == nil && op.command.LSN {
			a.rec.lsn, _ = replica.CommitLSN(ctx, conn)
		}
		return a
	}
	if op.sticky != nil && !op.stickyTaken {
		if a.err = c.takeSticky(ctx, op); a.err != nil {
			a.sticky = true
			return a
		}
		if err := c.open(ctx, tx, op, &b); err != nil {
			a.err = err
			return a
		}
	}
	grant, err := b.admit(op)
	if err != nil {
		a.err = err
		return a
	}
	cmdTx := c.newTx(op, tx, grant)
	raw, err := cmdTx.run(ctx, do)
	if err != nil {
		a.err = err
		return a
	}
	a.rec, a.unknown, a.err = c.commit(ctx, conn, cmdTx, b.marker, raw)
	if a.err != nil && !a.unknown && conn.Conn().IsClosed() {
		a.err = &fault.Lost{Err: a.err} // without an error of the function
	}
	return a
}

func rollback(ctx context.Context, conn *pgxpool.Conn) {
	if conn.Conn().IsClosed() || conn.Conn().PgConn().TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	_, _ = conn.Exec(ctx, "rollback") // if it fails, Release closes the connection
}

// What begin_command answers.
const (
	statusNew     = "new"
	statusReplay  = "replay"
	statusRetired = "retired"
	statusFuture  = "future"
)

// The last six columns are those of ledger.TokenRow.
const beginSQL = `
select status, fingerprint, result, scopes, amounts, seqs, ats, holds, at, denied,
    token_status, payload, uses_left, minted_at, expires_at, consumed_at
from metered.begin_command($1::bool, $2::bool, $3::metered.new_command, $4::metered.presented_token,
    $5::metered.new_charge[], $6::interval, $7::int)`

// begun is what begin_command returned.
type begun struct {
	marker      string
	status      string
	fingerprint []byte
	result      []byte
	scopes      []string
	amounts     []int64
	seqs        []int64
	ats         []time.Time
	holds       []string
	at          *time.Time
	denied      []byte
	token       ledger.TokenRow
}

func (b *begun) dest() []any {
	return append([]any{&b.status, &b.fingerprint, &b.result, &b.scopes, &b.amounts, &b.seqs, &b.ats, &b.holds, &b.at, &b.denied},
		b.token.Dest()...)
}

// begin sends flush 1. Sticky charges come between claiming and opening, so that
// a command with some begins with the claim alone.
func (c *Client) begin(ctx context.Context, conn *pgxpool.Conn, op *operation) (begun, pgx.Tx, error) {
	b := begun{marker: newMarker()}
	opening := op.sticky == nil || op.stickyTaken
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: op.isolation})
	batch.Queue(c.sql.begin, c.beginArgs(ctx, op, b.marker, true, opening, true)...)
	results := conn.SendBatch(ctx, batch)
	_, err := results.Exec()
	if err == nil {
		err = results.QueryRow().Scan(b.dest()...)
	}
	if err = firstOf(err, results.Close()); err != nil {
		return b, nil, failed("begin", ofBudget(op.charges, err))
	}
	return b, results.Tx(), b.standing()
}

// open sends the second half of flush 1.
func (c *Client) open(ctx context.Context, tx pgx.Tx, op *operation, b *begun) error {
	err := tx.QueryRow(ctx, c.sql.begin, c.beginArgs(ctx, op, b.marker, false, true, true)...).Scan(b.dest()...)
	if err != nil {
		return failed("open", ofBudget(op.charges, err))
	}
	return nil
}

func (c *Client) beginArgs(ctx context.Context, op *operation, marker string, claiming, opening, owned bool) []any {
	wait, left := c.timeouts(ctx)
	command := c.sent(op, marker)
	if owned { // else the settings are the caller's
		command.TimeoutMS = &left
	}
	token := ledger.PresentedToken{}
	if op.token != nil {
		token = *op.token
	}
	charges, tolerance := sentCharges(op.charges)
	return []any{claiming, opening, command.String(), token.String(), charges, tolerance, wait}
}

// sent is the command as its first and its last statement name it.
func (c *Client) sent(op *operation, marker string) ledger.Command {
	return ledger.Command{
		Namespace: op.command.Namespace, ID: op.command.ID, Key: op.key, IssuedAt: op.issued, MaxFuture: c.cfg.MaxFuture, Marker: marker,
	}
}

// sentCharges are charges as they are sent, which may be none.
func sentCharges(call *charging) (charges string, tolerance pgtype.Interval) {
	if call == nil {
		return ledger.Charges(nil), pgtype.Interval{Valid: true}
	}
	return ledger.Charges(call.Charges), call.Tolerance
}

// maxMargin is how much earlier than the client the server gives up, at most.
const maxMargin = 250 * time.Millisecond

// timeouts are, in ms, how long a wait for a lock may last, and how long the
// server may work on a statement, 0 without a deadline: a little less than ctx has
// left, so that the server gives up first. A client that has given up while its
// COMMIT waits on the server could not take it back.
func (c *Client) timeouts(ctx context.Context) (wait, statement int32) {
	wait = int32(c.cfg.LockTimeout / time.Millisecond)
	deadline, ok := ctx.Deadline()
	if !ok {
		return wait, 0
	}
	left := time.Until(deadline)
	left -= min(left/10, maxMargin)
	statement = int32(min(max(left/time.Millisecond, 1), 1<<30))
	return min(wait, statement), statement
}

// standing turns the answers to an id that is neither new nor replayed into
// errors.
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

// replay is the record of an operation that committed before.
func (b *begun) replay(op *operation) (record, error) {
	if string(b.fingerprint) != string(op.fingerprint) {
		return record{}, fmt.Errorf("%w: %q in namespace %q", ErrConflict, op.command.ID, op.command.Namespace)
	}
	return b.record()
}

func (b *begun) record() (record, error) {
	rec := record{raw: b.result, replayed: true, at: *b.at}
	for _, raw := range b.holds {
		h, err := decodeHold([]byte(raw))
		if err != nil {
			return record{}, err
		}
		rec.holds = append(rec.holds, h)
	}
	for i, scope := range b.scopes {
		rec.receipt.Entries = append(rec.receipt.Entries,
			budget.Posted{Scope: scope, Amount: b.amounts[i], Seq: b.seqs[i], At: b.ats[i]})
	}
	return rec, nil
}

// admit judges what flush 1 said of the token and of the budget, in this order.
func (b *begun) admit(op *operation) (*tokens.Grant, error) {
	var grant *tokens.Grant
	if op.token != nil {
		g, err := grantOf(*op.token, b.token)
		if err != nil {
			return nil, err
		}
		grant = &g
	}
	if len(b.denied) > 0 {
		return nil, op.charges.Denied(b.denied)
	}
	return grant, nil
}

// ofBudget turns what the budget's SQL functions raised into the errors of package budget.
func ofBudget(call *charging, err error) error {
	if Code(err) != "" {
		return err // it has them
	}
	switch sqlstate.Of(err) {
	case sqlstate.Exceeded, sqlstate.WindowPurged, sqlstate.ClockBehind, sqlstate.NumericOutOfRange:
		if call != nil {
			return call.Failed(err)
		}
	}
	return err
}

// firstOf is the error that came first: closing a batch repeats the error of reading it.
func firstOf(err, closing error) error {
	if err != nil {
		return err
	}
	return closing
}

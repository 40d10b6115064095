package metered

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/observed"
)

// Warm makes a new connection as fast as one that has been used: on a fresh one Postgres compiles and plans each function at
// its first call, which takes tens of milliseconds. It is for pgxpool.Config.AfterConnect, where deadlines are short:
//
//	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return metered.Warm(ctx, conn, "") }
//
// A pool goes on connecting when the caller that waits has left, so the next caller finds the connection warm. MinConns and
// MinIdleConns connect before anybody waits.
//
// Warm opens, renews and settles a session, and runs a command with a charge and a hold, in a transaction that it rolls
// back. Their scopes are nobody else's. It prepares statements as the connection's default mode says. An empty schema means
// "metered". Errors: *ArgumentError, and those of a connection that is of no use any more. Where the schema is missing, or
// not granted, Warm does nothing: the calls say so themselves.
func Warm(ctx context.Context, conn *pgx.Conn, schema string) error {
	if err := notNil("conn", conn); err != nil {
		return err
	}
	name, err := parseSchema("schema", schema)
	if err != nil {
		return err
	}
	c := &Client{cfg: Config{Schema: name.String(), LockTimeout: 5 * time.Second, MaxFuture: 5 * time.Minute}, schema: name, observer: observed.New(nil)}
	c.engine = command.New(nil, command.Config{Schema: name, LockTimeout: c.cfg.LockTimeout, MaxFuture: c.cfg.MaxFuture})
	if err := c.setUpPieces(); err != nil {
		return err
	}
	batch := &pgx.Batch{} // is prepared: these begin and end the flushes of a command
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	batch.Queue("commit")
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return err
	}
	return errors.Join(c.warm(ctx, tx), tx.Rollback(ctx))
}

// warm is nil also where a call fails: it will fail again, for its caller.
func (c *Client) warm(ctx context.Context, tx pgx.Tx) error {
	id := NewID()
	line := func(of string) []holds.Line {
		return []holds.Line{{Scope: "metered/warm/" + of + id, Amount: 1, Limits: []budget.Limit{budget.PerDay(9, time.UTC, time.Time{})}}}
	}
	charges := []budget.Charge{{Scope: "metered/warm/rate" + id, Amount: 1, Limits: []budget.Limit{budget.PerWindow(9, time.Minute), budget.Lifetime(9)}}}
	s := &session{client: c, r: Reservation{ID: id, Namespace: "metered/warm", Lines: line("session"), Charges: charges}}
	open, _, err := s.prepare()
	if err != nil {
		return err
	}
	opened, err := open.Scan(tx.QueryRow(ctx, open.SQL, open.Args(ledger.Sending{WaitMS: 1, Namespace: s.r.Namespace, Operation: id})...))
	if err != nil {
		return nil
	}
	s.id = opened[0].ID
	if _, err := c.Holds.Extend(ctx, tx, holds.Extend{Tenant: s.r.Namespace, IDs: []string{s.id}, By: time.Second}); err != nil {
		return nil
	}
	capture, err := inHolds.Capture(c.Holds, s.capture(Used{All: true}))
	if err != nil {
		return err
	}
	whole := Command{ID: NewID(), Namespace: s.r.Namespace, Charges: charges, Holds: []holds.Request{{Lines: line("hold"), TTL: time.Minute}}}
	for _, cmd := range []Command{s.command(capture), whole} {
		op, err := c.prepare(cmd, func(context.Context, *Tx) ([]byte, error) { return []byte("null"), nil })
		if err != nil {
			return err
		}
		if err := op.run(ctx, tx); err != nil {
			return nil
		}
	}
	return nil
}

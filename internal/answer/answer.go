// Package answer sends the statements of this library, so that no setting of a server, database,
// role or session makes an answer one that cannot be read, or that means something else.
//
// pgx asks for most answers in binary, whose form is fixed. But with QueryExecModeExec and
// QueryExecModeSimpleProtocol, as a proxy may want them, they come as text: a time in the session's
// DateStyle, an interval in its IntervalStyle, bytes as bytea_output says. Here such answers are
// asked for in the styles that pgx reads, within the same round trip, after which the session's
// styles are as they were. Bytes are read in both forms.
package answer

import (
	"bytes"
	"context"
	"encoding/hex"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Querier asks for rows: a pool, a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// RowQuerier asks for one row.
type RowQuerier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Sender sends batches.
type Sender interface {
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

type sender interface {
	Querier
	Sender
}

// Query is db.Query, whose answer no setting changes.
func Query(ctx context.Context, db Querier, sql string, args ...any) (pgx.Rows, error) {
	conn, by, release, err := inText(ctx, db)
	if err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	}
	if conn == nil {
		return db.Query(ctx, sql, args...)
	}
	defer release()
	return send(ctx, conn, by, sql, args)
}

// QueryRow is db.QueryRow, whose answer no setting changes.
func QueryRow(ctx context.Context, db RowQuerier, sql string, args ...any) pgx.Row {
	conn, by, release, err := inText(ctx, db)
	if err != nil {
		return wholeRow{err: err}
	}
	if conn == nil {
		return db.QueryRow(ctx, sql, args...)
	}
	defer release()
	return RowOf(send(ctx, conn, by, sql, args))
}

// SendBatch is db.SendBatch, whose answers no setting changes. db is a transaction or a connection,
// and the batch ends no transaction.
func SendBatch(ctx context.Context, db Sender, batch *pgx.Batch) pgx.BatchResults {
	if conn, by := textOf(db); conn != nil {
		return sendAll(ctx, conn, by, batch)
	}
	return db.SendBatch(ctx, batch)
}

// inText is textOf, also of a connection of a pool, which release gives back.
func inText(ctx context.Context, db any) (conn *pgx.Conn, by sender, release func(), err error) {
	pool, ok := db.(*pgxpool.Pool)
	if !ok {
		conn, by = textOf(db)
		return conn, by, func() {}, nil
	}
	if !Textual(pool) {
		return nil, nil, nil, nil
	}
	acquired, err := pool.Acquire(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	return acquired.Conn(), acquired.Conn(), acquired.Release, nil
}

// textOf is the connection of db, if its answers come as text, and what sends on it. A type of
// somebody else's that has no connection to show is left alone.
func textOf(db any) (conn *pgx.Conn, by sender) {
	by, ok := db.(sender)
	if !ok {
		return nil, nil
	}
	switch db := db.(type) {
	case *pgx.Conn:
		conn = db
	case interface{ Conn() *pgx.Conn }:
		conn = db.Conn()
	}
	if conn == nil || !textual(conn) {
		return nil, nil
	}
	return conn, by
}

// Tx is tx for a library that sends statements of its own, such as River: the settings change none
// of their answers either.
func Tx(tx pgx.Tx) pgx.Tx {
	if conn := tx.Conn(); conn == nil || !textual(conn) {
		return tx
	}
	return guarded{tx}
}

type guarded struct{ pgx.Tx }

func (g guarded) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := g.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return guarded{tx}, nil
}

func (g guarded) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return Query(ctx, g.Tx, sql, args...)
}

func (g guarded) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return QueryRow(ctx, g.Tx, sql, args...)
}

func (g guarded) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	return SendBatch(ctx, g.Tx, batch)
}

// plain copies a value. Bytes in text are in hex, whatever bytea_output is: Postgres escapes a
// backslash by another one, so that the forms differ in their second byte.
func plain(field pgconn.FieldDescription, value []byte) []byte {
	if value == nil || field.DataTypeOID != pgtype.ByteaOID || field.Format != pgx.TextFormatCode || bytes.HasPrefix(value, []byte(`\x`)) {
		return slices.Clone(value)
	}
	raw := make([]byte, 0, len(value))
	for i := 0; i < len(value); i++ {
		switch {
		case value[i] != '\\':
			raw = append(raw, value[i])
		case i+1 < len(value) && value[i+1] == '\\':
			raw, i = append(raw, '\\'), i+1
		case i+3 < len(value):
			octal, err := strconv.ParseUint(string(value[i+1:i+4]), 8, 8)
			if err != nil {
				return slices.Clone(value)
			}
			raw, i = append(raw, byte(octal)), i+3
		default:
			return slices.Clone(value)
		}
	}
	return hex.AppendEncode([]byte(`\x`), raw)
}

package ledger

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
)

// Whole runs statements that commit themselves, and reads their answers by ReadAll: an error of
// scanning then says nothing of the commit.
type Whole struct{ Conn *pgx.Conn }

// QueryRow is that of a connection.
func (w Whole) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return RowOf(w.Conn.Query(ctx, sql, args...))
}

// Query is that of a connection.
func (w Whole) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return ReadAll(w.Conn.Query(ctx, sql, args...))
}

// ReadAll reads rows to their end before the first is scanned. Then an error of the server is
// known, and one of scanning, after which pgx reads nothing more, hides no other.
func ReadAll(rows pgx.Rows, err error) (pgx.Rows, error) {
	if err != nil {
		return rows, err
	}
	read := &wholeRows{Rows: rows, at: -1}
	for rows.Next() {
		var row [][]byte
		for _, value := range rows.RawValues() {
			row = append(row, slices.Clone(value))
		}
		read.rows = append(read.rows, row)
	}
	rows.Close()
	return read, rows.Err()
}

// RowOf is the first of rows, read by ReadAll.
func RowOf(rows pgx.Rows, err error) pgx.Row {
	rows, err = ReadAll(rows, err)
	return wholeRow{rows, err}
}

type wholeRow struct {
	rows pgx.Rows
	err  error
}

func (r wholeRow) Scan(dest ...any) error {
	switch {
	case r.err != nil:
		return r.err
	case !r.rows.Next():
		return pgx.ErrNoRows
	}
	return r.rows.Scan(dest...)
}

// wholeRows are rows that were read.
type wholeRows struct {
	pgx.Rows
	rows [][][]byte
	at   int
}

func (r *wholeRows) Next() bool {
	r.at++
	return r.at < len(r.rows)
}

func (r *wholeRows) RawValues() [][]byte { return r.rows[r.at] }

func (r *wholeRows) Scan(dest ...any) error {
	return pgx.ScanRow(r.Conn().TypeMap(), r.FieldDescriptions(), r.RawValues(), dest...)
}

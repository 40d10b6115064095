package answer

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Whole runs statements that commit themselves, and reads their answers by ReadAll: an error of
// scanning then says nothing of the commit.
type Whole struct{ conn *pgx.Conn }

// In returns Whole of a connection.
func In(conn *pgx.Conn) Whole { return Whole{conn} }

// Conn is the connection.
func (w Whole) Conn() *pgx.Conn { return w.conn }

// QueryRow is that of a connection.
func (w Whole) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return RowOf(w.conn.Query(ctx, sql, args...))
}

// Query is that of a connection.
func (w Whole) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return ReadAll(w.conn.Query(ctx, sql, args...))
}

// ReadAll reads rows to their end before the first is scanned. Then an error of the server is
// known, and one of scanning, after which pgx reads nothing more, hides no other.
func ReadAll(rows pgx.Rows, err error) (pgx.Rows, error) {
	if err != nil {
		return rows, err
	}
	if read, ok := rows.(*wholeRows); ok {
		return read, nil
	}
	read := &wholeRows{Rows: rows, at: -1}
	for rows.Next() {
		if read.rows == nil {
			read.fields = slices.Clone(rows.FieldDescriptions())
		}
		row := make([][]byte, len(read.fields))
		for i, value := range rows.RawValues() {
			row[i] = plain(read.fields[i], value)
		}
		read.rows = append(read.rows, row)
	}
	if read.fields == nil {
		read.fields = slices.Clone(rows.FieldDescriptions())
	}
	rows.Close()
	return read, rows.Err()
}

// RowOf is the first of rows, read by ReadAll.
func RowOf(rows pgx.Rows, err error) pgx.Row {
	rows, err = ReadAll(rows, err)
	return wholeRow{rows, err}
}

// JSON is the one value, which is JSON, of the first of rows, or nil for null. They are read to
// their end. JSON has one form, whatever the types of the connection are.
func JSON(rows pgx.Rows, err error) (text []byte, _ error) {
	if err != nil {
		return nil, err
	}
	none := true
	for rows.Next() {
		if none {
			text, none = slices.Clone(rows.RawValues()[0]), false
		}
	}
	rows.Close()
	if err = rows.Err(); err == nil && none {
		err = pgx.ErrNoRows
	}
	return text, err
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

// wholeRows are rows that were read. The connection may have answered other statements since.
type wholeRows struct {
	pgx.Rows
	fields []pgconn.FieldDescription
	rows   [][][]byte
	at     int
}

func (r *wholeRows) Next() bool {
	r.at++
	return r.at < len(r.rows)
}

func (r *wholeRows) FieldDescriptions() []pgconn.FieldDescription { return r.fields }

func (r *wholeRows) RawValues() [][]byte { return r.rows[r.at] }

func (r *wholeRows) Scan(dest ...any) error {
	return pgx.ScanRow(r.TypeMap(), r.fields, r.RawValues(), dest...)
}

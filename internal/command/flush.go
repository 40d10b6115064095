package command

import (
	"cmp"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// flush is a batch with the functions that read its answers.
type flush struct {
	batch pgx.Batch
	reads []func(pgx.BatchResults) error
}

// exec queues a statement without an answer.
func (f *flush) exec(sql string, args ...any) {
	f.batch.Queue(sql, args...)
	f.reads = append(f.reads, func(r pgx.BatchResults) error { _, err := r.Exec(); return err })
}

// row queues a statement whose one row scan reads.
func (f *flush) row(scan func(pgx.Row) error, sql string, args ...any) {
	f.batch.Queue(sql, args...)
	f.reads = append(f.reads, func(r pgx.BatchResults) error { return scan(answer.RowOf(r.Query())) })
}

// read reads the answers, up to the first error.
func (f *flush) read(results pgx.BatchResults) error {
	for _, read := range f.reads {
		if err := read(results); err != nil {
			return err
		}
	}
	return nil
}

// readAll reads all answers. An answer that cannot be read stops it no more than one that can: it
// returns the first such error as unread. Errors of the server or of the connection, after which
// there are no more answers, are err.
func (f *flush) readAll(results pgx.BatchResults) (unread, err error) {
	for _, read := range f.reads {
		if err := read(results); err != nil {
			if !fault.Unreadable(err) {
				return unread, err
			}
			unread = cmp.Or(unread, err)
		}
	}
	return unread, nil
}

// into scans a row into dest.
func into(dest ...any) func(pgx.Row) error {
	return func(row pgx.Row) error { return row.Scan(dest...) }
}

// firstOf is the error that came first: closing a batch repeats the error of reading it.
func firstOf(err, closing error) error {
	if err != nil {
		return err
	}
	return closing
}

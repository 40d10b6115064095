package command

import (
	"cmp"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// flush is a batch, and what is to be done with its answers.
type flush struct {
	batch pgx.Batch
	reads []reading
	room  [6]reading // most have no more
}

// reading is what is to be done with an answer. One without any is read for its error.
type reading struct {
	row  func(pgx.Row) error          // reads its one row
	json func([]byte) error           // reads its one value, which is JSON, or nil for null
	of   func(error) error            // names its error
	all  func(pgx.BatchResults) error // reads this answer, and some that follow
	done *bool                        // is set when it has come
}

// queue queues a statement.
func (f *flush) queue(read reading, sql string, args []any) {
	if f.reads == nil {
		f.reads = f.room[:0]
		f.batch.QueuedQueries = make([]*pgx.QueuedQuery, 0, len(f.room))
	}
	f.batch.Queue(sql, args...)
	f.reads = append(f.reads, read)
}

// exec queues a statement without an answer.
func (f *flush) exec(sql string, args ...any) { f.queue(reading{}, sql, args) }

// row queues a statement whose one row scan reads.
func (f *flush) row(scan func(pgx.Row) error, sql string, args ...any) {
	f.queue(reading{row: scan}, sql, args)
}

// json queues a statement whose one value, which is JSON, read reads.
func (f *flush) json(read func([]byte) error, sql string, args ...any) {
	f.queue(reading{json: read}, sql, args)
}

// begin queues the beginning of a transaction.
func (f *flush) begin(opts pgx.TxOptions) {
	f.batch.BeginTx(opts)
	f.reads = append(f.room[:0], reading{})
}

func (r *reading) from(results pgx.BatchResults) (err error) {
	switch {
	case r.row != nil:
		err = r.row(answer.RowOf(results.Query()))
	case r.json != nil:
		var text []byte
		if text, err = answer.JSON(results.Query()); err == nil {
			err = r.json(text)
		}
	case r.all != nil:
		err = r.all(results)
	default:
		_, err = results.Exec()
	}
	if err != nil && r.of != nil {
		err = r.of(err)
	}
	if err == nil && r.done != nil {
		*r.done = true
	}
	return err
}

// read reads the answers, up to the first error.
func (f *flush) read(results pgx.BatchResults) error {
	for i := range f.reads {
		if err := f.reads[i].from(results); err != nil {
			return err
		}
	}
	return nil
}

// readAll reads all answers. An answer that cannot be read stops it no more than one that can: it
// returns the first such error as unread. Errors of the server or of the connection, after which
// there are no more answers, are err.
func (f *flush) readAll(results pgx.BatchResults) (unread, err error) {
	for i := range f.reads {
		if err := f.reads[i].from(results); err != nil {
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

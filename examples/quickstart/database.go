package main

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
)

// uploadsSQL is the application's own table. It knows nothing of the library.
const uploadsSQL = `
create table uploads (
    id         bigint generated always as identity primary key,
    account    text not null,
    name       text not null,
    content    bytea not null,
    sha256     bytea,       -- this and the next by the worker
    media_type text
)`

// counts is how many rows the database has of all that a command writes.
type counts struct{ Entries, Operations, Spent, Rows, Jobs int }

func (c counts) String() string {
	return fmt.Sprintf("entries %d, operations %d, tokens spent %d, rows %d, jobs %d",
		c.Entries, c.Operations, c.Spent, c.Rows, c.Jobs)
}

const countsSQL = `
select (select count(*) from metered.ledger), (select count(*) from metered.operations),
    (select count(*) from metered.tokens where used > 0),
    (select count(*) from uploads), (select count(*) from river_job)`

func count(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}) (c counts, err error) {
	err = db.QueryRow(ctx, countsSQL).Scan(&c.Entries, &c.Operations, &c.Spent, &c.Rows, &c.Jobs)
	return c, err
}

// indented puts lines in the report's column.
type indented struct{ out io.Writer }

func (i indented) Write(line []byte) (int, error) {
	_, err := fmt.Fprintf(i.out, "  %s", line)
	return len(line), err
}

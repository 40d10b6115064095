package budget

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
)

// searchLook is how many entries a statement of a search looks at.
const searchLook = 10_000

const searchSQL = `
select ` + entryColumns + `, matched, more
from (select (f.entry).*, f.matched, f.more from metered.search_entries($1::text, $2::bigint, $3::bigint, $4::bool, $5::int, $6::int,
    row($7::text, $8::text, $9::text::jsonb), $10::text) f) x`

// searches reports whether the options select by what an entry says, beside its number and time.
func (o *EntriesOptions) searches() bool {
	return o.Note != Note{} || o.Operation != "" || o.OperationTenant != "" || o.Name != ""
}

// search yields the entries between two numbers that the options select. Each statement looks at up
// to so many as look says.
func (l *Ledger) search(ctx context.Context, db Querier, scope string, after, before int64,
	opts EntriesOptions, look int, yield func(Entry, error) bool) {
	left := opts.Max
	for {
		most := bounds.MaxFound
		if opts.Max > 0 {
			most = min(most, left)
		}
		found, next, err := l.searchPage(ctx, db, scope, after, before, opts, look, most)
		if err != nil {
			yield(Entry{}, err)
			return
		}
		for _, e := range found {
			if !yield(e, nil) {
				return
			}
		}
		if left -= len(found); next == 0 || opts.Max > 0 && left == 0 {
			return
		}
		if opts.NewestFirst {
			before = next
		} else {
			after = next
		}
	}
}

// searchPage returns up to most entries, and the entry behind which the search goes on, or 0 at its
// end.
func (l *Ledger) searchPage(ctx context.Context, db Querier, scope string, after, before int64,
	opts EntriesOptions, look, most int) (found []Entry, next int64, err error) {
	rows, err := answer.Query(ctx, db, l.sql.search, scope, after, before, opts.NewestFirst, look, most,
		opts.OperationTenant, orNull(opts.Operation), orNull(opts.Note.json()), orNull(opts.Name))
	if err != nil {
		return nil, 0, failed("search", err)
	}
	last, more := int64(0), false
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
		var matched bool
		e, err := scanEntry(row, &matched, &more)
		last = e.Seq
		if matched {
			found = append(found, e)
		}
		return struct{}{}, err
	})
	if err != nil {
		return nil, 0, failed("search", err)
	}
	if len(found) > most {
		found = found[:most]
		last, more = found[most-1].Seq, true
	}
	if more {
		next = last
	}
	return found, next, nil
}

func orNull(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// checkSearch refuses texts that no entry can have.
func (o *EntriesOptions) checkSearch() error {
	for _, f := range []struct{ name, text string }{
		{"Note.Actor", o.Note.Actor}, {"Note.Tenant", o.Note.Tenant},
		{"Note.Correlation", o.Note.Correlation}, {"Note.Reason", o.Note.Reason},
		{"Note.Use", o.Note.Use},
		{"Operation", o.Operation}, {"OperationTenant", o.OperationTenant}, {"Name", o.Name},
	} {
		if err := checkText("EntriesOptions."+f.name, f.text, maxIDBytes); err != nil {
			return err
		}
	}
	return nil
}

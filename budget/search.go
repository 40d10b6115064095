package budget

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
)

const (
	defaultSearch = 10_000
	defaultFound  = 100
)

// EntrySearch selects entries.
type EntrySearch struct {
	EntriesOptions // with Max to find, 1 to 1,000. Defaults to 100

	// Note matches the notes that have its fields. Empty fields match all.
	Note Note

	// Operation is the id of a command or event.
	Operation string

	// OperationTenant is the tenant that owns Operation.
	OperationTenant string

	// Name is the name of the command, which is known until its record is purged.
	Name string

	// Look is the most entries to look at, up to 100,000. Defaults to 10,000.
	Look int
}

// EntriesFound is a page.
type EntriesFound struct {
	// Entries are the found entries, in the order that the search asks for.
	Entries []Entry `json:"entries"`

	// Next goes on with the search: give it as After (with NewestFirst as Before). It is 0 at the
	// end.
	Next int64 `json:"next,omitempty"`
}

const searchSQL = `
select ` + entryColumns + `, matched, more
from (select (f.entry).*, f.matched, f.more from metered.search_entries($1::text, $2::bigint, $3::bigint, $4::bool, $5::int, $6::int,
    row($7::text, $8::text, $9::text::jsonb), $10::text) f) x`

// SearchEntries scans up to Look entries of a scope, without an index: From and To leave fewer.
func (l *Ledger) SearchEntries(ctx context.Context, db Querier, scope string,
	search EntrySearch) (found EntriesFound, err error) {
	if err := search.check(); err != nil {
		return EntriesFound{}, err
	}
	most, look := cmp.Or(search.Max, defaultFound), cmp.Or(search.Look, defaultSearch)
	after, before, err := l.between(ctx, db, scope, search.EntriesOptions)
	if err != nil {
		return EntriesFound{}, err
	}
	rows, err := answer.Query(ctx, db, l.sql.search, scope, after, before, search.NewestFirst, look, most,
		search.OperationTenant, orNull(search.Operation), orNull(search.Note.json()), orNull(search.Name))
	if err != nil {
		return EntriesFound{}, failed("search", err)
	}
	last, more := int64(0), false
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
		var matched bool
		e, err := scanEntry(row, &matched, &more)
		last = e.Seq
		if matched {
			found.Entries = append(found.Entries, e)
		}
		return struct{}{}, err
	})
	if err != nil {
		return EntriesFound{}, failed("search", err)
	}
	if len(found.Entries) > most {
		found.Entries = found.Entries[:most]
		last, more = found.Entries[most-1].Seq, true
	}
	if more {
		found.Next = last
	}
	return found, nil
}

func orNull(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

func (s *EntrySearch) check() error {
	for _, f := range []struct{ name, text string }{
		{"Note.Actor", s.Note.Actor}, {"Note.Tenant", s.Note.Tenant},
		{"Note.Correlation", s.Note.Correlation}, {"Note.Reason", s.Note.Reason},
		{"Note.Use", s.Note.Use},
		{"Operation", s.Operation}, {"OperationTenant", s.OperationTenant}, {"Name", s.Name},
	} {
		if err := checkText("EntrySearch."+f.name, f.text, maxIDBytes); err != nil {
			return err
		}
	}
	switch {
	case s.Max > bounds.MaxFound:
		return invalid("EntrySearch.Max", "%d is more than %d", s.Max, bounds.MaxFound)
	case s.Look < 0 || s.Look > bounds.MaxSearch:
		return invalid("EntrySearch.Look", "%d is not from 0 to %d", s.Look, bounds.MaxSearch)
	}
	return nil
}

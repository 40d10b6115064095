package budget

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
)

// Bounds of EntrySearch.
const (
	MaxSearch     = 100_000 // entries that one search looks at
	MaxFound      = 1000    // entries that one search finds
	defaultSearch = 10_000
	defaultFound  = 100
)

// EntrySearch says which entries of a scope are looked for. A field that is left out matches every entry.
type EntrySearch struct {
	// EntriesOptions say where to look, and in which order. Max is how many entries are found, up to MaxFound. It
	// defaults to 100.
	EntriesOptions
	Note            Note   // entries whose notes have the same texts, in those of its fields that are not ""
	Operation       string // entries of the command or event with this id
	OperationTenant string // of Operation. Defaults to "", which is a tenant, too
	// Name is that of the command that made the entry (metered.Command.Name). It is on record until
	// metered.Client.PurgeOperations deletes the operation.
	Name string
	Look int // how many entries are looked at, up to MaxSearch. Defaults to 10,000
}

// EntriesFound is the answer of a search, in the order in which it looked.
type EntriesFound struct {
	Entries []Entry `json:"entries"`
	// Next is the number of the last entry that was looked at, if there may be more: to go on, pass it as After, or
	// with NewestFirst as Before. Else it is 0.
	Next int64 `json:"next,omitempty"`
}

const searchSQL = `
select ` + entryColumns + `, matched, more
from (select (f.entry).*, f.matched, f.more from metered.search_entries($1::text, $2::bigint, $3::bigint, $4::bool, $5::int, $6::int,
    row($7::text, $8::text, $9::text::jsonb), $10::text) f) x`

// SearchEntries looks for entries of a scope by their fields. There is no index for that: it scans the scope's entries, up
// to Look of them in one statement, and says where to go on. A range of time (From, To) leaves it less to scan.
func (l *Ledger) SearchEntries(ctx context.Context, db Querier, scope string, search EntrySearch) (EntriesFound, error) {
	if err := search.check(); err != nil {
		return EntriesFound{}, err
	}
	most, look := cmp.Or(search.Max, defaultFound), cmp.Or(search.Look, defaultSearch)
	after, before, err := l.between(ctx, db, scope, search.EntriesOptions)
	if err != nil {
		return EntriesFound{}, err
	}
	rows, err := db.Query(ctx, l.sql.search, scope, after, before, search.NewestFirst, look, most,
		search.OperationTenant, orNull(search.Operation), orNull(search.Note.json()), orNull(search.Name))
	if err != nil {
		return EntriesFound{}, failed("search", err)
	}
	var found EntriesFound
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
		{"Note.Actor", s.Note.Actor}, {"Note.Tenant", s.Note.Tenant}, {"Note.Correlation", s.Note.Correlation}, {"Note.Reason", s.Note.Reason},
		{"Operation", s.Operation}, {"OperationTenant", s.OperationTenant}, {"Name", s.Name},
	} {
		if err := checkText("EntrySearch."+f.name, f.text, maxIDBytes); err != nil {
			return err
		}
	}
	switch {
	case s.Max > MaxFound:
		return invalid("EntrySearch.Max", "%d is more than %d", s.Max, MaxFound)
	case s.Look < 0 || s.Look > MaxSearch:
		return invalid("EntrySearch.Look", "%d is not from 0 to %d", s.Look, MaxSearch)
	}
	return nil
}

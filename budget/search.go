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
	// EntriesOptions say where to look, and in which order. Max is how many entries are found, up to MaxFound; it
	// defaults to 100.
	EntriesOptions
	Note      Note   // entries whose notes have the same texts, in those of its fields that are not ""
	Operation string // entries of the command or event with this id
	Namespace string // of Operation; defaults to "", which is a namespace, too
	Look      int    // how many entries are looked at, up to MaxSearch; defaults to 10,000
}

// EntriesFound is what a search found, in the order in which it looked.
type EntriesFound struct {
	Entries []Entry `json:"entries"`
	// Next is the number of the last entry that was looked at. To go on, pass it as After, or with NewestFirst as Before.
	// It is 0 if there is nothing more to look at.
	Next int64 `json:"next,omitempty"`
}

// The last entry to be looked at is found first, and always comes: it says how far the search came. What is looked at is
// bounded also where nothing matches.
const (
	searchSQL = `
with looked as materialized (
    select max(x.seq) as last, count(*) as n
    from (select seq from metered.ledger where scope = $1 and seq > $2 and seq < $3 order by seq limit $4) x
)
select e.*, looked.n >= $4
from looked, lateral (
    select ` + entryColumns + `, ` + matches + ` as matches
    from metered.ledger l
    where scope = $1 and seq > $2 and seq <= looked.last and (seq = looked.last or ` + matches + `)
    order by seq limit $5) e`
	searchBackSQL = `
with looked as materialized (
    select min(x.seq) as last, count(*) as n
    from (select seq from metered.ledger where scope = $1 and seq > $2 and seq < $3 order by seq desc limit $4) x
)
select e.*, looked.n >= $4
from looked, lateral (
    select ` + entryColumns + `, ` + matches + ` as matches
    from metered.ledger l
    where scope = $1 and seq < $3 and seq >= looked.last and (seq = looked.last or ` + matches + `)
    order by seq desc limit $5) e`

	matches = `coalesce(($6 = '' or note ->> 'actor' = $6) and ($7 = '' or note ->> 'tenant' = $7)
        and ($8 = '' or note ->> 'correlation' = $8) and ($9 = '' or note ->> 'reason' = $9)
        and ($10 = '' or operation = $10 and coalesce(namespace, '') = $11), false)`
)

// SearchEntries looks for entries of a scope by what they say. No index knows that: it reads the entries one after the other, up
// to Look of them, in one statement, and says where to go on. A range of time (From, To) leaves it less to read.
func (l *Ledger) SearchEntries(ctx context.Context, db Querier, scope string, search EntrySearch) (EntriesFound, error) {
	if err := search.check(); err != nil {
		return EntriesFound{}, err
	}
	most, look := cmp.Or(search.Max, defaultFound), cmp.Or(search.Look, defaultSearch)
	after, before, err := l.between(ctx, db, scope, search.EntriesOptions)
	if err != nil {
		return EntriesFound{}, err
	}
	sql, n := l.sql.search, search.Note
	if search.NewestFirst {
		sql = l.sql.searchBack
	}
	rows, err := db.Query(ctx, sql, pgx.QueryExecModeExec, scope, after, before, look, most+1,
		n.Actor, n.Tenant, n.Correlation, n.Reason, search.Operation, search.Namespace)
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

func (s *EntrySearch) check() error {
	for _, f := range []struct{ name, text string }{
		{"Note.Actor", s.Note.Actor}, {"Note.Tenant", s.Note.Tenant}, {"Note.Correlation", s.Note.Correlation}, {"Note.Reason", s.Note.Reason},
		{"Operation", s.Operation}, {"Namespace", s.Namespace},
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

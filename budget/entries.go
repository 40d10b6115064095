package budget

import (
	"cmp"
	"context"
	"iter"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
)

// EntryKind says what an entry does: a verb, such as "lapse". What the entry does to lots is said by
// MoveKind, in participles, such as "lapsed".
type EntryKind string

// Kinds of entries (Entry.Kind). A switch over them names these, since a mistyped text counts
// nothing.
const (
	// EntryCharge spends units.
	EntryCharge EntryKind = "charge"

	// EntryCredit adds units.
	EntryCredit EntryKind = "credit"

	// EntryRefund gives units of a charge back.
	EntryRefund EntryKind = "refund"

	// EntryClockRepair begins a new Epoch, after the clock had been set back.
	EntryClockRepair EntryKind = "clock repair"

	// EntryHold keeps units.
	EntryHold EntryKind = "hold"

	// EntryCapture spends held units.
	EntryCapture EntryKind = "capture"

	// EntryRelease frees held units.
	EntryRelease EntryKind = "release"

	// EntryExpire frees held units, by time.
	EntryExpire EntryKind = "expire"

	// EntryClose ends a carved scope.
	EntryClose EntryKind = "close"

	// EntryLapse ends units of a lot, which lowers Credited.
	EntryLapse EntryKind = "lapse"

	// EntryRevoke takes units of a lot back, which lowers Credited.
	EntryRevoke EntryKind = "revoke"

	// EntryRollOver ends units of a lot. The credit after it has them again.
	EntryRollOver EntryKind = "roll over"

	// EntrySchedule is about a lot that begins later, or whose end was set.
	EntrySchedule EntryKind = "schedule"
)

// kinds are the kinds as the ledger stores them.
var kinds = map[string]EntryKind{
	"c": EntryCharge, "d": EntryCredit, "r": EntryRefund, "k": EntryClockRepair,
	"h": EntryHold, "u": EntryCapture, "l": EntryRelease, "x": EntryExpire, "z": EntryClose,
	"e": EntryLapse, "v": EntryRevoke, "o": EntryRollOver, "s": EntrySchedule,
}

// An Entry has the scope's sums after it.
type Entry struct {
	// Scope is the scope whose history the entry is in.
	Scope string `json:"scope"`

	// Seq numbers the entries of a scope: 1, 2, 3, and so on.
	Seq int64 `json:"seq"`

	// Kind is one of EntryCharge, EntryCredit, EntryRefund and so on.
	Kind EntryKind `json:"kind"`

	// Amount is the entry's number of units. It is 0 for a clock repair and a close.
	Amount int64 `json:"amount"`

	// At is the database's time after it had the scope's lock. It never decreases within an Epoch.
	At time.Time `json:"at"`

	// Epoch is how many clock repairs came before the entry.
	Epoch int `json:"epoch"`

	// Spent are the units that all charges and captures of the scope had taken, with this entry.
	Spent int64 `json:"spent"`

	// Refunded are the units that all refunds had given back, with this entry.
	Refunded int64 `json:"refunded"`

	// Credited are the units that all credits had added, with this entry. What lapsed in a wallet is
	// subtracted.
	Credited int64 `json:"credited"`

	// Held are the units of open holds and leases, with this entry.
	Held int64 `json:"held"`

	// HoldDue is a time before which no open hold of the scope falls due.
	HoldDue time.Time `json:"hold_due,omitzero"`

	// Ref is the Seq of the charge that a refund gives back.
	Ref int64 `json:"ref,omitempty"`

	// Hold is the id of the entry's hold. It is "" for no hold, and for several.
	Hold string `json:"hold,omitempty"`

	// OperationTenant is the tenant of the command or event that wrote the entry.
	OperationTenant string `json:"operation_tenant,omitempty"`

	// Operation is the id of the command or event that wrote the entry.
	Operation string `json:"operation,omitempty"`

	// Note is the caller's note of the entry.
	Note Note `json:"note,omitzero"`

	// OccurredAt is when the event of the entry happened, as its sender says. It is zero for an
	// entry of no event.
	OccurredAt time.Time `json:"occurred_at,omitzero"`
}

// EntriesOptions selects entries. The zero value selects all, oldest first.
type EntriesOptions struct {
	// NewestFirst yields the newest entry first.
	NewestFirst bool

	// After skips the entries up to this number. Defaults to none.
	After int64

	// Before skips the entries from this number on. 0 skips none.
	Before int64

	// Max is the most entries to yield. 0 is all.
	Max int

	// From and To bound the entries' times, as in UsageBetween. They cost one more round trip.
	From, To time.Time

	// Note selects entries whose notes have its fields. Empty fields match all. It, and the fields
	// below, have no index: the server looks at each entry that the fields above leave, 10,000 in a
	// statement.
	Note Note

	// Operation selects the entries of a command or an event, by its id.
	Operation string

	// OperationTenant is the tenant that owns Operation.
	OperationTenant string

	// Name selects the entries of commands with this name, which is known until their records are
	// purged.
	Name string
}

const entriesPage = 500

// Times are in microseconds: as text they would be in the session's DateStyle.
const entryColumns = `scope, seq, kind::text, amount, (extract(epoch from at) * 1e6)::bigint, epoch, spent, refunded, credited, held,
    (extract(epoch from nullif(next_due, '-infinity')) * 1e6)::bigint, coalesce(ref, 0), coalesce(hold, ''), coalesce(operation_tenant, ''), coalesce(operation, ''),
    coalesce(note ->> 'actor'::text, ''), coalesce(note ->> 'tenant'::text, ''), coalesce(note ->> 'correlation'::text, ''), coalesce(note ->> 'reason'::text, ''),
    coalesce(note ->> 'use'::text, ''), coalesce(note ->> 'occurred_at'::text, '')`

const (
	entrySQL = `
select ` + entryColumns + `
from metered.ledger
where scope = $1 and seq > $2 and seq < $3 `
	entriesSQL = entrySQL + `order by seq limit $4`
	newestSQL  = entrySQL + `order by seq desc limit $4`
)

// Entries yields a scope's entries. A purge leaves a gap after entry 1.
func (l *Ledger) Entries(ctx context.Context, db Querier, scope string,
	opts EntriesOptions) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		after, before, err := l.between(ctx, db, scope, opts)
		if err != nil {
			yield(Entry{}, err)
			return
		}
		if opts.searches() {
			l.search(ctx, db, scope, after, before, opts, searchLook, yield)
			return
		}
		left := opts.Max
		sql := l.sql.entries
		if opts.NewestFirst {
			sql = l.sql.newest
		}
		for {
			limit := entriesPage
			if opts.Max > 0 {
				limit = min(limit, left)
			}
			// Planned for each page: a plan kept from when the ledger was small reads all of it.
			rows, err := answer.Query(ctx, db, sql, pgx.QueryExecModeExec, scope, after, before, limit)
			if err != nil {
				yield(Entry{}, failed("entries", err))
				return
			}
			page, err := pgx.CollectRows(rows,
				func(row pgx.CollectableRow) (Entry, error) { return scanEntry(row) })
			if err != nil {
				yield(Entry{}, failed("entries", err))
				return
			}
			for _, e := range page {
				if !yield(e, nil) {
					return
				}
			}
			left -= len(page)
			if len(page) < limit || opts.Max > 0 && left == 0 {
				return
			}
			if last := page[len(page)-1].Seq; opts.NewestFirst {
				before = last
			} else {
				after = last
			}
		}
	}
}

// between is the part of a chain that opts selects: the entries after one number, and before
// another.
func (l *Ledger) between(ctx context.Context, db Querier, scope string,
	opts EntriesOptions) (after, before int64, err error) {
	if err := cmp.Or(l.made(), notNil("db", db), checkScope("scope", scope)); err != nil {
		return 0, 0, err
	}
	for _, option := range []struct {
		field string
		value int64
	}{{"After", opts.After}, {"Before", opts.Before}, {"Max", int64(opts.Max)}} {
		if option.value < 0 {
			return 0, 0, invalid("EntriesOptions."+option.field, "%d is negative", option.value)
		}
	}
	if err := opts.checkSearch(); err != nil {
		return 0, 0, err
	}
	after, before = opts.After, cmp.Or(opts.Before, math.MaxInt64)
	var times []time.Time
	for _, t := range []time.Time{opts.From, opts.To} {
		if !t.IsZero() {
			times = append(times, upToMicro(t))
		}
	}
	if len(times) == 0 {
		return after, before, nil
	}
	if err := cmp.Or(checkTime("EntriesOptions.From", opts.From),
		checkTime("EntriesOptions.To", opts.To)); err != nil {
		return 0, 0, err
	}
	if len(times) == 2 && !times[0].Before(times[1]) {
		return 0, 0, invalid("EntriesOptions.To", "is not after From")
	}
	at, err := l.sumsAt(ctx, db, scope, times, nil)
	if err != nil {
		return 0, 0, err
	}
	if !opts.From.IsZero() {
		after = max(after, at[0].seq)
	}
	if !opts.To.IsZero() {
		before = min(before, at[len(at)-1].seq+1)
	}
	return after, before, nil
}

// scanEntry reads an entry, and the columns after it into more.
func scanEntry(row pgx.CollectableRow, more ...any) (Entry, error) {
	var e Entry
	var kind string
	var at int64
	var due *int64
	var occurred string
	err := row.Scan(append([]any{&e.Scope, &e.Seq, &kind, &e.Amount, &at, &e.Epoch, &e.Spent,
		&e.Refunded, &e.Credited, &e.Held,
		&due, &e.Ref, &e.Hold, &e.OperationTenant, &e.Operation,
		&e.Note.Actor, &e.Note.Tenant, &e.Note.Correlation, &e.Note.Reason, &e.Note.Use, &occurred},
		more...)...)
	if err != nil {
		return Entry{}, err
	}
	e.Kind, e.At = kinds[kind], time.UnixMicro(at).UTC()
	e.OccurredAt, _ = time.Parse(time.RFC3339Nano, occurred) // zero for an entry that Ingest did not write
	if due != nil {
		e.HoldDue = time.UnixMicro(*due).UTC()
	}
	return e, nil
}

package budget

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// UsageEvent is a charge that counts once.
type UsageEvent struct {
	Charge

	// ID names the event within its Tenant: 1 to 255 bytes. Events and commands of a tenant share
	// their ids. A UUIDv7 carries the time at which it was made.
	ID string

	// Tenant owns the ID, in up to 255 bytes.
	Tenant string

	// OccurredAt is when the event happened, within Config.MaxLateness and Config.MaxFuture of the
	// clock. It is stored. Limits count the event when it is recorded.
	OccurredAt time.Time
}

const maxIDBytes = 255

// Ingest is ChargeEach for up to 1,000 events, and records their ids. A recorded event is not
// counted again: its answer is the first entry, with Posted.Replayed, or ErrConflict if scope,
// amount or OccurredAt differ. A refused event is not recorded.
//
// After a purge of operations (package maintain) an event whose time (a UUIDv7's, or OccurredAt) is
// not after the last deleted record is ErrRetired, and one without a time is new. The ids are locked
// before the scopes.
func (l *Ledger) Ingest(ctx context.Context, tx pgx.Tx, events ...UsageEvent) ([]Result, error) {
	if err := cmp.Or(l.made(), notNil("tx", tx), checkBatch("events", len(events))); err != nil {
		return nil, err
	}
	items := make([]*item, len(events))
	for i := range events {
		var err error
		if items[i], err = l.newEventItem(&events[i]); err != nil {
			return nil, located("events", i, err)
		}
	}
	return l.observedEach(ctx, "budget.ingest",
		func(ctx context.Context) ([]Result, error) { return l.eachIn(ctx, tx, items) })
}

// eachOnce is each for charges among which an event may be several times.
func (l *Ledger) eachOnce(ctx context.Context, db Querier, items []*item, skipBusy,
	telling bool) ([]Result, error) {
	type id struct{ tenant, id string }
	first := make(map[id]int) // in distinct
	place := make([]int, len(items))
	distinct := make([]*item, 0, len(items))
	for i, a := range items {
		place[i] = len(distinct)
		if a.event != nil {
			if j, seen := first[id{a.event.Tenant, a.event.ID}]; seen {
				place[i] = j
				continue
			}
			first[id{a.event.Tenant, a.event.ID}] = len(distinct)
		}
		distinct = append(distinct, a)
	}
	answers, err := l.each(ctx, db, distinct, skipBusy, telling)
	if err != nil || len(distinct) == len(items) {
		return answers, err
	}
	results := make([]Result, len(items))
	for i, a := range items {
		switch same := distinct[place[i]]; {
		case same == a:
			results[i] = answers[place[i]]
		case slices.Equal(same.event.Fingerprint, a.event.Fingerprint):
			results[i] = answers[place[i]].replays()
		default:
			results[i] = a.result(&eachRow{status: "conflict"})
		}
	}
	return results, nil
}

func (l *Ledger) newEventItem(e *UsageEvent) (*item, error) {
	if e.ID == "" {
		return nil, invalid(".ID", "is empty")
	}
	if err := cmp.Or(checkText(".ID", e.ID, maxIDBytes),
		checkText(".Tenant", e.Tenant, maxIDBytes)); err != nil {
		return nil, err
	}
	if at := e.OccurredAt; !at.IsZero() && (at.Year() < 1 || at.Year() > 9999) {
		return nil, invalid(".OccurredAt", "the year %d is not from 1 to 9999", at.Year())
	}
	a, err := l.newItem(e.Charge)
	if err != nil {
		return nil, err
	}
	a.event = &ledger.Event{
		Tenant: e.Tenant, ID: e.ID, Key: lockkey.OfOperation(l.schema.String(), e.Tenant, e.ID),
		Fingerprint: e.fingerprint(), IssuedAt: uuidv7.Time(e.ID),
	}
	if !e.OccurredAt.IsZero() {
		at := e.OccurredAt.UTC().Truncate(time.Microsecond)
		a.event.OccurredAt = &at
		if a.event.IssuedAt == nil {
			a.event.IssuedAt = &at
		}
		a.charge.Note = e.Note.occurred(at)
	}
	return a, nil
}

// fingerprint is a version byte and the SHA-256 of an event's content: its scope, amount and time.
// A command's begins with a length, which is never negative, so that no event has that of a
// command.
func (e *UsageEvent) fingerprint() []byte {
	const version = 1
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 64+len(e.Scope)), 1<<63)
	of := internals{}.Content(e.Scope, e.Note.Use)
	b = binary.BigEndian.AppendUint64(b, uint64(len(of)))
	b = append(b, of...)
	b = binary.BigEndian.AppendUint64(b, uint64(e.Amount))
	if !e.OccurredAt.IsZero() {
		b = binary.BigEndian.AppendUint64(b, uint64(e.OccurredAt.Truncate(time.Microsecond).UnixMicro()))
	}
	sum := sha256.Sum256(b)
	return append([]byte{version}, sum[:]...)
}

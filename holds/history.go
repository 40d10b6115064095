package holds

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
)

// EventKind is a kind of transition.
type EventKind string

const (
	// EventPlaced is the placement of a hold or claim.
	EventPlaced EventKind = "placed"

	// EventCapturedPart is a capture that left the hold open (Capture.Keep).
	EventCapturedPart EventKind = "captured in part"

	// EventCaptured is the capture that ended the hold.
	EventCaptured EventKind = "captured"

	// EventExtended is a later deadline.
	EventExtended EventKind = "extended"

	// EventReleased is the release that ended the hold.
	EventReleased EventKind = "released"

	// EventExpired is the end of a hold by time.
	EventExpired EventKind = "expired"

	// EventReturned is a Return of all that was captured.
	EventReturned EventKind = "returned"

	// EventReturnedPart is a Return of a part of it.
	EventReturnedPart EventKind = "returned in part"
)

// kinds are the kinds as the tables store them.
var kinds = map[string]EventKind{
	"h": EventPlaced, "p": EventCapturedPart, "c": EventCaptured, "e": EventExtended,
	"r": EventReleased, "x": EventExpired, "b": EventReturned, "g": EventReturnedPart,
}

// HistoryEvent is a transition of a hold, as History yields them. Rebuild needs these, not their JSON.
type HistoryEvent struct {
	// Tenant is the hold's tenant.
	Tenant string `json:"tenant,omitempty"`

	// ID is the hold's id.
	ID string `json:"id"`

	// Version numbers the transitions of a hold: 1, 2, 3, and so on.
	Version int `json:"version"`

	// Kind is what happened to the hold.
	Kind EventKind `json:"kind"`

	// At is the time of the transition. For an expiry it is when the expiry was recorded.
	At time.Time `json:"at"`

	// Deadline is the new deadline, of a placement or an extension.
	Deadline time.Time `json:"deadline,omitzero"`

	// Metadata is that of the Placement, in the event of a placement.
	Metadata json.RawMessage `json:"metadata,omitempty"`

	// Entity is that of the Capture, in the event of a capture.
	Entity string `json:"entity,omitempty"`

	// Captures are the entries of a capture. Their At may be later than the event's.
	Captures []budget.Posted `json:"captures,omitempty"`

	// Refunds are parts of charges that a Return of Lines gave back.
	Refunds []budget.Posted `json:"refunds,omitempty"`

	// Skipped are purged charges that a Return left spent.
	Skipped []budget.Posted `json:"skipped,omitempty"`

	// OperationTenant and Operation name the command that made the transition, if one did.
	OperationTenant string `json:"operation_tenant,omitempty"`

	// Operation is the id of that command.
	Operation string `json:"operation,omitempty"`

	// Note is the caller's note of the transition.
	Note budget.Note `json:"note,omitzero"`

	placed *placed
}

const historySQL = `
select e.version, e.kind::text, e.at, e.deadline, coalesce(e.entity, ''), e.detail, coalesce(e.note ->> 'actor'::text, ''), coalesce(e.note ->> 'tenant'::text, ''),
    coalesce(e.note ->> 'correlation'::text, ''), coalesce(e.note ->> 'reason'::text, ''), coalesce(e.note ->> 'use'::text, ''),
    coalesce(e.operation_tenant, ''), coalesce(e.operation, ''),
    case when e.version = 1 then (select h.metadata::text from metered.holds h where h.no = e.hold) end
from metered.hold_events e
where e.hold = (select h.no from metered.holds h where h.tenant = $1 and h.id = $2 and ($3 = '' or h.holder = $3))
order by e.version`

// History returns a hold's transitions, oldest first, with Get's errors. An expiry is missing until
// it is recorded, though Get says Expired.
func (b *Book) History(ctx context.Context, db budget.Querier, tenant, id,
	holder string) ([]HistoryEvent, error) {
	if err := cmp.Or(b.made(), notNil("db", db)); err != nil {
		return nil, err
	}
	if err := checkNames(tenant, holder, id); err != nil {
		return nil, err
	}
	for range 2 {
		rows, err := answer.Query(ctx, db, b.sql.history, tenant, id, holder)
		if err != nil {
			return nil, failed("history", err)
		}
		events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (HistoryEvent, error) {
			e := HistoryEvent{Tenant: tenant, ID: id}
			err := e.scan(row)
			return e, err
		})
		if err != nil {
			return nil, failed("history", err)
		}
		if len(events) > 0 {
			return events, nil
		}
		if _, err := b.Get(ctx, db, tenant, id, holder); err != nil {
			return nil, err
		}
		// The hold was placed between the two statements.
	}
	return nil, fmt.Errorf("holds: the history of %q is missing", id)
}

func (e *HistoryEvent) scan(row pgx.CollectableRow) error {
	var kind string
	var deadline *time.Time
	var detail []byte
	var metadata *string
	err := row.Scan(&e.Version, &kind, &e.At, &deadline, &e.Entity, &detail, &e.Note.Actor,
		&e.Note.Tenant, &e.Note.Correlation, &e.Note.Reason, &e.Note.Use,
		&e.OperationTenant, &e.Operation, &metadata)
	if err != nil {
		return err
	}
	e.Kind, e.At = kinds[kind], e.At.UTC()
	if deadline != nil {
		e.Deadline = deadline.UTC()
	}
	if metadata != nil {
		e.Metadata = json.RawMessage(*metadata)
	}
	switch e.Kind {
	case EventPlaced:
		e.placed = &placed{}
		err = json.Unmarshal(detail, e.placed)
	case EventCaptured, EventCapturedPart:
		err = json.Unmarshal(detail, &e.Captures)
	case EventReturnedPart:
		err = json.Unmarshal(detail, &e.Refunds)
	case EventReturned:
		if detail != nil {
			err = json.Unmarshal(detail, &e.Skipped)
		}
	}
	if err != nil {
		return err
	}
	for _, posted := range [][]budget.Posted{e.Captures, e.Refunds, e.Skipped} {
		for i := range posted {
			posted[i].At = posted[i].At.UTC()
		}
	}
	return nil
}

// Rebuild adds a history to a snapshot, a Hold of any call or zero, and returns the hold as of the
// last event. Events up to the snapshot's Version are skipped. Gaps and contradictions are errors.
func Rebuild(snapshot Hold, history []HistoryEvent) (Hold, error) {
	if snapshot.Version == 0 && len(history) == 0 {
		return Hold{}, invalid("history", "is empty")
	}
	h := snapshot
	h.Lines, h.Created, h.Charges = slices.Clone(h.Lines), false, nil
	for _, e := range history {
		if snapshot.Version > 0 && (e.Tenant != h.Tenant || e.ID != h.ID) {
			return Hold{}, fmt.Errorf("holds: the history is of %q, and the snapshot of %q", e.ID, h.ID)
		}
		if e.Version <= snapshot.Version && e.Version > 0 {
			continue
		}
		if e.Version != h.Version+1 || (e.Kind == EventPlaced) != (h.Version == 0) ||
			e.Kind == EventPlaced && e.placed == nil {
			return Hold{}, fmt.Errorf("holds: the history of %q is not whole at version %d", e.ID, e.Version)
		}
		if h.State == Expired && h.Version == snapshot.Version {
			h.revive()
		}
		from := Held
		if e.Kind == EventReturned || e.Kind == EventReturnedPart {
			from = Captured
		}
		if h.Version > 0 && h.State != from {
			return Hold{}, fmt.Errorf("holds: %q was %s while it was %s", e.ID, e.Kind, h.State)
		}
		h.Version, h.Now = e.Version, e.At
		if err := h.apply(e); err != nil {
			return Hold{}, err
		}
	}
	return h, nil
}

// revive makes a hold held again that was read after its deadline, before its expiry was recorded.
func (h *Hold) revive() {
	h.State, h.EndedAt = Held, time.Time{}
	for i, l := range h.Lines {
		h.Lines[i].Open = max(0, l.Amount-l.Captured)
	}
}

// apply changes a hold by an event.
func (h *Hold) apply(e HistoryEvent) error {
	switch e.Kind {
	case EventPlaced:
		p := e.placed
		grace := time.Duration(p.GraceUS) * time.Microsecond
		h.Tenant, h.ID, h.Holder, h.State, h.PlacedAt = e.Tenant, e.ID, p.Holder, Held, e.At
		h.Deadline, h.Due = e.Deadline, e.Deadline.Add(grace)
		if p.LifetimeUS > 0 {
			h.Ceiling = e.At.Add(time.Duration(p.LifetimeUS) * time.Microsecond)
		}
		h.Lines = slices.Clone(p.Lines)
		slices.SortFunc(h.Lines, func(a, b HeldLine) int { return cmp.Compare(a.Scope, b.Scope) })
		h.Metadata = e.Metadata
		if p.Claim != "" {
			key, err := parseClaim(p.Claim)
			if err != nil {
				return err
			}
			h.Claim = &key
		}
	case EventExtended:
		h.Due = h.Due.Add(e.Deadline.Sub(h.Deadline))
		h.Deadline = e.Deadline
	case EventCaptured, EventCapturedPart:
		for _, c := range e.Captures {
			i := slices.IndexFunc(h.Lines, func(l HeldLine) bool { return l.Scope == c.Scope })
			if i < 0 {
				return fmt.Errorf("holds: %q captured of scope %q, which it does not keep", e.ID, c.Scope)
			}
			h.Lines[i].Captured += c.Amount
			h.Lines[i].Open = max(0, h.Lines[i].Open-c.Amount)
		}
		if e.Entity != "" {
			h.Entity = e.Entity
		}
		if e.Kind == EventCaptured {
			h.end(Captured, e.At)
		}
	case EventReleased:
		h.end(Released, e.At)
		h.Reason = e.Note.Reason
	case EventExpired:
		for i, l := range h.Lines {
			h.Lines[i].Captured = max(l.Captured, l.AtLeast)
		}
		h.end(Expired, h.Due)
	case EventReturnedPart:
		for _, r := range e.Refunds {
			for i := range h.Lines {
				if h.Lines[i].Scope == r.Scope {
					h.Lines[i].Refunded += r.Amount
				}
			}
		}
	case EventReturned:
		h.State, h.Reason = Returned, e.Note.Reason
		for i := range h.Lines {
			all := h.Lines[i].Captured
			for _, kept := range e.Skipped {
				if kept.Scope == h.Lines[i].Scope {
					all -= kept.Amount
				}
			}
			h.Lines[i].Refunded = max(h.Lines[i].Refunded, all)
		}
	default:
		return fmt.Errorf("holds: the history of %q has a kind which this build does not know", e.ID)
	}
	return nil
}

func (h *Hold) end(s State, at time.Time) {
	h.State, h.EndedAt = s, at
	for i := range h.Lines {
		h.Lines[i].Open = 0
	}
}

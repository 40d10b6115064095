package main

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
)

// The end of a hold matters only if the seat shows that hold: an older one's end can be announced late, when the seat
// is somebody else's.
const projectSQL = `
with changed as (
    update hall.seats s
    set state = $2, hold = $3, holder = $4, held_until = $5, source = $6
    where s.id = $1 and (s.hold = $7 or $8))
insert into hall.audit (org, actor, action, event, seat, hold, operation, address, agent, changes)
select e.org, $9, $10, e.id, s.id, $7, nullif($11, ''), $12, $13, $14
from hall.seats s join hall.events e on e.id = s.event
where s.id = $1`

// changes are the audit table's columns of a transition.
type changes struct {
	Transition holds.EventKind `json:"transition"`
	State      string          `json:"state"` // of the seat
	Source     string          `json:"source,omitempty"`
	HeldUntil  *time.Time      `json:"held_until,omitempty"`
	Entity     string          `json:"entity,omitempty"`
	Reason     string          `json:"reason,omitempty"`
}

// project writes a transition into the copy that the map is read from, and into the audit table. Both are in the
// transaction of the transition, so that neither is without the other.
func project(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
	h := t.Hold
	if h.Claim == nil || h.Claim.Type != "seat" {
		return nil
	}
	if isBlock(h) && t.Kind == holds.EventPlaced {
		return nil // it is captured at once
	}
	c := changes{Transition: t.Kind, State: "free", Source: sourceOf(h), Entity: h.Entity, Reason: t.Note.Reason}
	hold, holder, source := &h.ID, &h.Holder, &c.Source
	switch t.Kind {
	case holds.EventPlaced, holds.EventExtended:
		c.State, c.HeldUntil = "held", &h.Due
	case holds.EventCaptured:
		c.State = "sold"
		if isBlock(h) {
			c.State = "blocked"
		}
	default:
		hold, holder, source = nil, nil, nil
	}
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	takes := t.Kind == holds.EventPlaced || c.State == "blocked"
	r := askingIn(ctx)
	action := r.action
	if action == "" {
		action = string(t.Kind)
	}
	_, err = tx.Exec(ctx, projectSQL, h.Claim.Value, c.State, hold, holder, c.HeldUntil, source,
		h.ID, takes, t.Note.Actor, action, t.Note.Correlation, r.address(), r.agent(), text)
	return err
}

package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
)

// What is over matters only if it is the hold that the seat shows: an older one's end can be told late, when the seat is
// somebody else's.
const projectSQL = `
with changed as (
    update hall.seats s
    set state = $2, hold = $3, holder = $4, held_until = $5
    where s.id = $1 and (s.hold = $6 or $7))
insert into hall.audit (org, actor, action, event, seat, hold, operation)
select e.org, $8, $9, e.id, s.id, $6, nullif($10, '')
from hall.seats s join hall.events e on e.id = s.event
where s.id = $1`

// project writes what became of a hold into the copy that the map is read from, and into the audit table: in the
// transaction of the transition, so that neither is without the other.
func project(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
	h := t.Hold
	if h.Claim == nil || h.Claim.Type != "seat" {
		return nil
	}
	state, hold, holder, until := "free", (*string)(nil), (*string)(nil), (*time.Time)(nil)
	switch t.Kind {
	case holds.EventPlaced, holds.EventExtended:
		state, hold, holder, until = "held", &h.ID, &h.Holder, &h.Due
	case holds.EventCaptured:
		state, hold, holder = "sold", &h.ID, &h.Holder
		if isBlock(h) {
			state = "blocked"
		}
	}
	_, err := tx.Exec(ctx, projectSQL, h.Claim.Value, state, hold, holder, until,
		h.ID, t.Kind == holds.EventPlaced, t.Note.Actor, string(t.Kind), t.Note.Correlation)
	return err
}

const historySQL = `
select a.at, a.action, a.actor from hall.audit a where a.seat = $1 and a.code = '' order by a.id desc limit 100`

// serveHistory tells what became of a seat; who did it only to admins.
func (a *app) serveHistory(w http.ResponseWriter, r request) error {
	var found bool
	if err := noRows(a.pool.QueryRow(r.Context(), ownSeatSQL, r.seat, r.event, r.who.Org).Scan(&found)); err != nil {
		return err
	}
	rows, err := a.pool.Query(r.Context(), historySQL, r.seat)
	if err != nil {
		return err
	}
	type line struct {
		At     time.Time `json:"at"`
		Action string    `json:"action"`
		Actor  string    `json:"actor,omitempty"`
	}
	lines, err := pgx.CollectRows(rows, pgx.RowToStructByPos[line])
	if err != nil {
		return err
	}
	for i := range lines {
		if !r.who.Admin {
			lines[i].Actor = ""
		}
	}
	return reply(w, http.StatusOK, map[string]any{"seat_id": r.seat, "history": lines})
}

// noRows makes of an answer without rows that there is no such thing.
func noRows(err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return errNotFound
	}
	return err
}

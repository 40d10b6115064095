package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
)

const capacitySQL = `
update hall.blocks b set capacity = $4
from (select b.id, b.capacity from hall.blocks b join hall.events e on e.id = b.event where b.id = $1 and e.id = $2 and e.org = $3) was
where b.id = was.id
returning was.capacity`

// serveCapacity sets how many seats of a block may be held and sold. Seats held or sold beyond it stay so.
func (a *app) serveCapacity(w http.ResponseWriter, r *request) error {
	type capacity struct {
		Capacity *int64 `json:"capacity"`
	}
	var body capacity
	if err := decode(w, r, &body); err != nil {
		return err
	}
	if body.Capacity == nil || *body.Capacity < 0 || *body.Capacity > 100_000 {
		return badRequest("the capacity is not a number of seats")
	}
	return a.set(w, r, func(ctx context.Context, tx pgx.Tx) (any, error) {
		var was capacity
		return &was, tx.QueryRow(ctx, capacitySQL, r.block, r.event, r.who.Org, *body.Capacity).Scan(&was.Capacity)
	})
}

const (
	statusOfSQL = `select status from hall.events where id = $1 and org = $2`
	statusSQL   = `update hall.events set status = $2 where id = $1`
)

// serveStatus brings an event to a status, which may be the one that it has.
func (a *app) serveStatus(w http.ResponseWriter, r *request) error {
	type state struct {
		Status status `json:"status"`
	}
	var body state
	if err := decode(w, r, &body); err != nil {
		return err
	}
	if _, ok := successors[body.Status]; !ok {
		return badRequest("the status is none")
	}
	return a.set(w, r, func(ctx context.Context, tx pgx.Tx) (any, error) {
		var was state
		if err := tx.QueryRow(ctx, statusOfSQL, r.event, r.who.Org).Scan(&was.Status); err != nil {
			return nil, err
		}
		if was != body && !slices.Contains(successors[was.Status], body.Status) {
			return nil, errSuccessor
		}
		_, err := tx.Exec(ctx, statusSQL, r.event, body.Status)
		return was, err
	})
}

const saleSQL = `
update hall.events e set opens = $3, closes = $4, hold_seconds = $5, holds_end = $6
from (select id, opens, closes, hold_seconds, holds_end from hall.events where id = $1 and org = $2) was
where e.id = was.id
returning was.opens, was.closes, was.hold_seconds, was.holds_end`

const maxHoldSeconds = 3600

// serveSale sets all of an event's sale: a field that is left out gets its default. Present holds keep their time.
func (a *app) serveSale(w http.ResponseWriter, r *request) error {
	var body sale
	if err := decode(w, r, &body); err != nil {
		return err
	}
	switch s := body; {
	case s.Opens != nil && s.Closes != nil && !s.Opens.Before(*s.Closes):
		return badRequest("the sale closes before it opens")
	case s.HoldSeconds != nil && (*s.HoldSeconds < 1 || *s.HoldSeconds > maxHoldSeconds):
		return badRequest(fmt.Sprintf("seats are held for 1 to %d seconds", maxHoldSeconds))
	case s.HoldsEnd && s.Closes == nil:
		return badRequest("holds cannot end with a sale that does not")
	}
	return a.set(w, r, func(ctx context.Context, tx pgx.Tx) (any, error) {
		var was sale
		return &was, tx.QueryRow(ctx, saleSQL, r.event, r.who.Org, body.Opens, body.Closes, body.HoldSeconds, body.HoldsEnd).
			Scan(&was.Opens, &was.Closes, &was.HoldSeconds, &was.HoldsEnd)
	})
}

// set carries out a command on an event of the caller's organisation, after the sales under way, and records the
// values before and after. A repeated request does not undo a later change by another one.
func (a *app) set(w http.ResponseWriter, r *request, do func(context.Context, pgx.Tx) (was any, err error)) error {
	_, err := metered.Do(r.Context(), a.metered, metered.Command{
		ID: r.operation, Tenant: r.who.tenant(), Name: r.action, Input: []any{r.event, r.block, r.asked},
	}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if err := changing(ctx, tx, r.who.Org, r.event); err != nil {
			return nil, err
		}
		was, err := do(ctx, tx)
		if err != nil {
			return nil, noRows(err)
		}
		return nil, r.audit(ctx, tx, "", map[string]any{"was": was, "is": r.asked})
	})
	if err != nil {
		return err
	}
	a.live.touch(r.who.Org) // the other processes find it with their next refresh
	return reply(w, http.StatusOK, map[string]string{"done": "set"})
}

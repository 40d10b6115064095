package main

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
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

const saleSQL = `
update hall.events e set status = $3, opens = $4, closes = $5
from (select id, status, opens, closes from hall.events where id = $1 and org = $2) was
where e.id = was.id
returning was.status, was.opens, was.closes`

// serveSale sets an event's status and its sale window. Present holds keep their time.
func (a *app) serveSale(w http.ResponseWriter, r *request) error {
	var body hallEvent
	if err := decode(w, r, &body); err != nil {
		return err
	}
	if !slices.Contains([]status{statusDraft, statusPublished, statusLive, statusClosed, statusCancelled}, body.Status) {
		return badRequest("the status is none")
	}
	if body.Opens != nil && body.Closes != nil && !body.Opens.Before(*body.Closes) {
		return badRequest("the sale closes before it opens")
	}
	return a.set(w, r, func(ctx context.Context, tx pgx.Tx) (any, error) {
		var was hallEvent
		return &was, tx.QueryRow(ctx, saleSQL, r.event, r.who.Org, body.Status, body.Opens, body.Closes).Scan(&was.Status, &was.Opens, &was.Closes)
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

// house has the blocked seats: a block is a claim for good. So nobody can hold the seat, and a block cannot come in
// between a hold and its checkout unseen.
const house = "house"

func isBlock(h holds.Hold) bool { return h.Holder == house }

// serveBlock takes a seat out of the sale. Its holder loses it. A seat that was sold stays sold.
func (a *app) serveBlock(w http.ResponseWriter, r *request) error {
	return a.change(w, r, func(ctx context.Context, tx *metered.Tx, h holds.Hold) error {
		switch {
		case isBlock(h):
			return nil
		case h.State == holds.Captured:
			return errSold
		case h.State == holds.Held:
			err := tx.Release(holds.Release{Tenant: r.who.Org, IDs: []string{h.ID}, Note: r.note("the seat was blocked")})
			if err != nil {
				return err
			}
		}
		id, err := tx.Claim(ctx, holds.Claim{
			Tenant: r.who.Org, Key: seatKey(r.seat), Holder: house, TTL: time.Minute, Note: r.note("blocked"),
		}, nil)
		if err != nil {
			return err
		}
		return tx.Capture(holds.Capture{Tenant: r.who.Org, IDs: []string{id}, All: true, Holder: house, Note: r.note("blocked")})
	})
}

// serveUnblock puts a seat back into the sale.
func (a *app) serveUnblock(w http.ResponseWriter, r *request) error {
	return a.change(w, r, func(ctx context.Context, tx *metered.Tx, h holds.Hold) error {
		if !isBlock(h) {
			return nil
		}
		_, err := a.metered.Holds.Return(ctx, tx, holds.Return{Tenant: r.who.Org, IDs: []string{h.ID}, Note: r.note("unblocked"), All: true})
		return err
	})
}

const ownSeatSQL = `
select true from hall.seats s join hall.events e on e.id = s.event
where s.id = $1 and e.id = $2 and e.org = $3`

// change carries out a command on a seat of one's organisation, with its hold if it has one.
func (a *app) change(w http.ResponseWriter, r *request, do func(context.Context, *metered.Tx, holds.Hold) error) error {
	_, err := metered.Do(r.Context(), a.metered, metered.Command{
		ID: r.operation, Tenant: r.who.tenant(), Name: r.action, Input: []string{r.event, r.seat},
	}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		var found bool
		if err := noRows(tx.QueryRow(ctx, ownSeatSQL, r.seat, r.event, r.who.Org).Scan(&found)); err != nil {
			return nil, err
		}
		claimed, err := a.metered.Holds.Claimed(ctx, tx, r.who.Org, seatKey(r.seat))
		if err != nil {
			return nil, err
		}
		return nil, do(ctx, tx, claimed[seatKey(r.seat)])
	})
	if errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrTaken) {
		return errChanged // between the look and the locks
	}
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, map[string]string{"seat_id": r.seat, "done": r.action})
}

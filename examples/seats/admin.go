package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
)

// forAdmins refuses everybody else.
func forAdmins(serve func(http.ResponseWriter, request) error) func(http.ResponseWriter, request) error {
	return func(w http.ResponseWriter, r request) error {
		if !r.who.Admin {
			return errNotAdmin
		}
		return serve(w, r)
	}
}

// house has the seats that are blocked: to block a seat is to claim it for good. So nobody can hold it, and who blocks it
// cannot come in between a hold and its checkout unseen.
const house = "house"

// blocked is the metadata of the house's claims.
var blocked = json.RawMessage(`{"blocked":true}`)

func isBlock(h holds.Hold) bool { return h.Holder == house && len(h.Metadata) > 0 }

// serveBlock takes a seat out of the sale. Whoever holds it loses it; a seat that was sold stays sold.
func (a *app) serveBlock(w http.ResponseWriter, r request) error {
	return a.change(w, r, "block", func(ctx context.Context, tx *metered.Tx) error {
		h, err := a.metered.Holds.Claimed(ctx, tx, r.who.Org, seatKey(r.seat))
		switch {
		case errors.Is(err, holds.ErrUnknown):
		case err != nil:
			return err
		case isBlock(h):
			return nil
		case h.State == holds.Captured:
			return errSold
		default:
			err = tx.Release(holds.Release{Tenant: r.who.Org, IDs: []string{h.ID}, Note: r.note("the seat was blocked")})
			if err != nil {
				return err
			}
		}
		id, err := tx.Claim(ctx, holds.Claim{
			Tenant: r.who.Org, Key: seatKey(r.seat), Holder: house, TTL: time.Minute, Metadata: blocked, Note: r.note("blocked"),
		}, nil)
		if err != nil {
			return err
		}
		return tx.Capture(holds.Capture{Tenant: r.who.Org, IDs: []string{id}, All: true, Holder: house, Note: r.note("blocked")})
	})
}

// serveUnblock puts a seat back into the sale.
func (a *app) serveUnblock(w http.ResponseWriter, r request) error {
	return a.change(w, r, "unblock", func(ctx context.Context, tx *metered.Tx) error {
		h, err := a.metered.Holds.Claimed(ctx, tx, r.who.Org, seatKey(r.seat))
		if errors.Is(err, holds.ErrUnknown) || err == nil && !isBlock(h) {
			return nil // it is not blocked
		}
		if err != nil {
			return err
		}
		_, err = a.metered.Holds.Refund(ctx, tx, holds.Refund{Tenant: r.who.Org, IDs: []string{h.ID}, Note: r.note("unblocked"), All: true})
		return err
	})
}

const ownSeatSQL = `
select true from hall.seats s join hall.events e on e.id = s.event
where s.id = $1 and e.id = $2 and e.org = $3`

// change carries out a command on a seat of the admin's organisation.
func (a *app) change(w http.ResponseWriter, r request, name string, do func(context.Context, *metered.Tx) error) error {
	_, err := metered.Do(r.Context(), a.metered, metered.Command{
		ID: r.operation, Namespace: r.who.namespace(), Name: name, Input: []string{r.event, r.seat},
	}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		var found bool
		if err := noRows(tx.QueryRow(ctx, ownSeatSQL, r.seat, r.event, r.who.Org).Scan(&found)); err != nil {
			return nil, err
		}
		return nil, do(ctx, tx)
	})
	if errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrTaken) {
		return errChanged // between the look and the locks
	}
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, map[string]string{"seat_id": r.seat, "done": name})
}

const capacitySQL = `
with changed as (
    update hall.blocks b set capacity = $4 from hall.events e
    where b.id = $1 and b.event = $2 and e.id = b.event and e.org = $3
    returning b.event)
insert into hall.audit (org, actor, action, event, operation, remote)
select $3, $5, 'capacity ' || $4::bigint, c.event, $6, $7 from changed c`

// serveCapacity sets how many seats of a block may be held and sold. What is held or sold beyond it stays so.
func (a *app) serveCapacity(w http.ResponseWriter, r request) error {
	var body struct{ Capacity *int64 }
	if err := decode(w, r, &body); err != nil {
		return err
	}
	if body.Capacity == nil || *body.Capacity < 0 || *body.Capacity > 100_000 {
		return badRequest("the capacity is not a number of seats")
	}
	return a.set(w, r, "capacity", body, capacitySQL, r.block, r.event, r.who.Org, *body.Capacity, holds.User(r.who.User), r.operation, r.remote())
}

const statusSQL = `
with changed as (update hall.events e set status = $3 where e.id = $1 and e.org = $2 returning e.id)
insert into hall.audit (org, actor, action, event, operation, remote)
select $2, $4, 'status ' || $3, c.id, $5, $6 from changed c`

// serveStatus publishes an event, closes it, or takes it back.
func (a *app) serveStatus(w http.ResponseWriter, r request) error {
	var body struct{ Status string }
	if err := decode(w, r, &body); err != nil {
		return err
	}
	switch body.Status {
	case "draft", "published", "closed":
	default:
		return badRequest("the status is none")
	}
	return a.set(w, r, "status", body, statusSQL, r.event, r.who.Org, body.Status, holds.User(r.who.User), r.operation, r.remote())
}

// set carries out a command on an event of the admin's organisation, when the sales that are being made are done. Its
// statement is its own audit record. What has been set since by another one stays so when the request comes once more.
func (a *app) set(w http.ResponseWriter, r request, name string, body any, sql string, args ...any) error {
	_, err := metered.Do(r.Context(), a.metered, metered.Command{
		ID: r.operation, Namespace: r.who.namespace(), Name: name, Input: []any{r.event, r.block, body},
	}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if err := changing(ctx, tx, r.who.Org, r.event); err != nil {
			return nil, err
		}
		tag, err := tx.Exec(ctx, sql, args...)
		if err == nil && tag.RowsAffected() == 0 {
			err = errNotFound
		}
		return nil, err
	})
	if err != nil {
		return err
	}
	a.live.touch(r.who.Org) // the other processes find it with their next refresh
	return reply(w, http.StatusOK, map[string]string{"done": "set"})
}

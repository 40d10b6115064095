package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
)

// house has the blocked seats: a block is a claim for good. So nobody can hold the seat, and a block cannot come in
// between a hold and its checkout unseen.
const house = "house"

func isBlock(h holds.Hold) bool { return h.Holder == house }

// serveBlock takes a seat out of the sale. Its holder loses it. A seat that was sold stays sold.
func (a *app) serveBlock(w http.ResponseWriter, r *request) error {
	return a.change(w, r, func(ctx context.Context, tx *metered.Tx) error {
		claimed, err := a.metered.Holds.Claimed(ctx, tx, r.who.Org, seatKey(r.seat))
		h, taken := claimed[seatKey(r.seat)]
		switch {
		case err != nil:
			return err
		case !taken:
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
	return a.change(w, r, func(ctx context.Context, tx *metered.Tx) error {
		claimed, err := a.metered.Holds.Claimed(ctx, tx, r.who.Org, seatKey(r.seat))
		if err != nil {
			return err
		}
		h := claimed[seatKey(r.seat)]
		if !isBlock(h) {
			return nil
		}
		_, err = a.metered.Holds.Return(ctx, tx, holds.Return{Tenant: r.who.Org, IDs: []string{h.ID}, Note: r.note("unblocked"), All: true})
		return err
	})
}

const ownSeatSQL = `
select true from hall.seats s join hall.events e on e.id = s.event
where s.id = $1 and e.id = $2 and e.org = $3`

// change carries out a command on a seat of one's organisation.
func (a *app) change(w http.ResponseWriter, r *request, do func(context.Context, *metered.Tx) error) error {
	_, err := metered.Do(r.Context(), a.metered, metered.Command{
		ID: r.operation, Tenant: r.who.tenant(), Name: r.action, Input: []string{r.event, r.seat},
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
	return reply(w, http.StatusOK, map[string]string{"seat_id": r.seat, "done": r.action})
}

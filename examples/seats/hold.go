package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
)

// A user may hold ten seats in five minutes, released ones included: seats are not for trying.
var perUser = budget.PerWindow(10, 5*time.Minute).Named("holds")

// seatKey is the key of a seat's claim.
func seatKey(seat string) holds.Key { return holds.Key{Type: "seat", Value: seat} }

// place is where a seat is.
type place struct {
	Section string `json:"section"`
	Row     string `json:"row"`
	Number  int    `json:"number"`
}

// end is when a hold ends, absolutely and as the time left by the database's clock: a client's clock may be wrong.
type end struct {
	HeldUntil        time.Time `json:"held_until"`
	HeldUntilUnix    int64     `json:"held_until_unix"`
	ExpiresInSeconds int64     `json:"expires_in_seconds"`
}

func endOf(h holds.Hold) end {
	return end{h.Deadline, h.Deadline.Unix(), int64(h.Remaining() / time.Second)}
}

// heldSeat is the answer to a hold.
type heldSeat struct {
	HoldID  string `json:"hold_id"`
	EventID string `json:"event_id"`
	SeatID  string `json:"seat_id"`
	place
	Status string `json:"status"`
	Source string `json:"source"`
	end
}

// origin is the metadata of a hold.
type origin struct {
	Source string `json:"source"`
}

func sourceOf(h holds.Hold) string {
	var o origin
	_ = json.Unmarshal(h.Metadata, &o) // one that is not ours has none
	return o.Source
}

const seatSQL = `
select b.name, s.row, s.number, b.id, ` + eventColumns + `
from (select metered.clock() as now) c, hall.seats s join hall.blocks b on b.id = s.block join hall.events e on e.id = s.event
where s.id = $1 and e.id = $2 and e.org = $3`

// hold holds a seat: the seat, a place of its block's capacity and the user's allowance, with a cleanup job and the
// history, all or none of them. The holder of the seat gets the same hold again, and is charged nothing.
//
// EarlyRelease, since the sections are hot: a commit that notifies would otherwise keep all others of the database
// waiting for the disk. The browsers may see the hold a moment before it is durable. Its answer comes after that.
func (a *app) hold(ctx context.Context, r *request, via string) (metered.Outcome[place], error) {
	by := sources[via]
	return metered.Do(ctx, a.metered, metered.Command{
		ID: r.operation, Tenant: r.who.tenant(), Name: "hold", Input: []string{r.event, r.seat, via}, EarlyRelease: true,
	}, func(ctx context.Context, tx *metered.Tx) (p place, err error) {
		var e hallEvent
		var block string
		row := append([]any{&p.Section, &p.Row, &p.Number, &block}, e.columns()...)
		if err := selling(ctx, tx, r.who.Org, r.event, row, seatSQL, r.seat, r.event, r.who.Org); err != nil {
			return p, err
		}
		if err := e.refuses(by); err != nil {
			return p, err
		}
		metadata, err := json.Marshal(origin{via})
		if err != nil {
			return p, err
		}
		claim := holds.Claim{
			Tenant: r.who.Org, Key: seatKey(r.seat), Holder: r.who.User, TTL: a.cfg.holdFor, Metadata: metadata, Note: r.note(""),
			Lines: []holds.Line{{
				Scope: budget.ScopeKey("block", block, ""), Amount: 1,
				Limits: []budget.Limit{budget.Lifetime(0).MaxFrom(`select capacity from hall.blocks where id = $1`, block)},
			}},
		}
		if len(by.limits) > 0 {
			claim.Charges = []budget.Charge{{Scope: budget.ScopeKey("holds", r.who.User, ""), Amount: 1, Limits: by.limits}}
		}
		_, err = tx.Claim(ctx, claim, &jobs.Cleanup{MaxAttempts: 3}) // it announces the hold's end, and the seat is free without it
		return p, err
	})
}

func (a *app) serveHold(w http.ResponseWriter, r *request) error {
	var body struct {
		Source string `json:"source"`
	}
	if err := decode(w, r, &body); err != nil && !errors.Is(err, errNoBody) {
		return err
	}
	via, err := r.via(body.Source)
	if err != nil {
		return err
	}
	out, err := a.hold(r.Context(), r, via)
	if errors.Is(err, holds.ErrTaken) {
		return a.whyTaken(r.Context(), r)
	}
	if err != nil {
		return err
	}
	h, status := out.Holds[0], http.StatusOK
	if h.Created {
		status = http.StatusCreated
	}
	if out.Replayed { // the hold as it was then: it has less time by now, and may be over
		if h, err = a.metered.Holds.Get(r.Context(), a.pool, r.who.Org, h.ID, r.who.User); err != nil {
			return err
		}
	}
	return reply(w, status, heldSeat{h.ID, r.event, r.seat, out.Result, string(h.State), sourceOf(h), endOf(h)})
}

// whyTaken describes a seat that somebody else has: its state, and until when, but not by whom.
func (a *app) whyTaken(ctx context.Context, r *request) error {
	claimed, err := a.metered.Holds.Claimed(ctx, a.pool, r.who.Org, seatKey(r.seat))
	h, taken := claimed[seatKey(r.seat)]
	switch {
	case err != nil:
		return err
	case !taken:
		return errChanged // it is free by now
	case isBlock(h):
		return errBlocked
	case h.State == holds.Captured:
		return errSold
	}
	until := endOf(h)
	return &refusal{
		Status: http.StatusConflict, Code: "seat_held", Detail: "Somebody else is holding this seat.", RetryAfterSeconds: seconds(h.Remaining()),
		Extra: map[string]any{"held_until": until.HeldUntil, "held_until_unix": until.HeldUntilUnix, "expires_in_seconds": until.ExpiresInSeconds},
	}
}

// serveCancel gives a hold up.
func (a *app) serveCancel(w http.ResponseWriter, r *request) error {
	_, err := metered.Do(r.Context(), a.metered, metered.Command{
		ID: r.operation, Tenant: r.who.tenant(), Name: "cancel", Input: r.hold, EarlyRelease: true,
	}, func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Release(holds.Release{Tenant: r.who.Org, IDs: []string{r.hold}, Holder: r.who.User, Note: r.note("cancelled")})
	})
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, map[string]string{"hold_id": r.hold, "status": "released"})
}

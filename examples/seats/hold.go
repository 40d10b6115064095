package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/holds/holdjobs"
)

// A user may hold ten seats in five minutes, released ones included: seats are not for trying.
var perUser = budget.PerWindow(10, 5*time.Minute).Named("holds")

// seatKey is what is claimed of a seat.
func seatKey(seat string) holds.Key { return holds.Key{Type: "seat", Value: seat} }

// place is where a seat is.
type place struct {
	Section string `json:"section"`
	Row     string `json:"row"`
	Number  int    `json:"number"`
	block   string
	limit   int64
}

// heldSeat is the answer to a hold.
type heldSeat struct {
	HoldID  string `json:"hold_id"`
	EventID string `json:"event_id"`
	SeatID  string `json:"seat_id"`
	place
	Status           string    `json:"status"`
	HeldUntil        time.Time `json:"held_until"`
	ExpiresInSeconds int64     `json:"expires_in_seconds"`
}

// An event is sold and changed under a lock of its own, shared by all who sell. It is taken before anything that depends on
// it is read, with a statement of its own, so that the next one sees what was waited for; and before the locks of the
// library's scopes. It is no row lock: those who share a row let each other past whoever waits to change it, so that in a
// rush nobody could close the sale. Advisory locks are granted in turn.
const (
	sellingSQL  = `select pg_advisory_xact_lock_shared($1, hashtext($2))`
	changingSQL = `select pg_advisory_xact_lock($1, hashtext($2))`

	eventLocks = 7_328_322 // the first half of their keys
)

// selling keeps an event as it is until the transaction ends: one that is being closed, or a capacity that is being
// lowered, is waited for, and its new state is the one that counts.
func selling(ctx context.Context, tx pgx.Tx, org, event string) error {
	_, err := tx.Exec(ctx, sellingSQL, eventLocks, org+"/"+event)
	return err
}

// changing waits for the sales that are being made, and lets none begin until the transaction ends.
func changing(ctx context.Context, tx pgx.Tx, org, event string) error {
	_, err := tx.Exec(ctx, changingSQL, eventLocks, org+"/"+event)
	return err
}

const seatSQL = `
select b.name, s.row, s.number, b.id, b.capacity, e.status
from hall.seats s join hall.blocks b on b.id = s.block join hall.events e on e.id = s.event
where s.id = $1 and e.id = $2 and e.org = $3`

// openSeat is a seat of an event whose seats are being sold, and are until the transaction ends.
func openSeat(ctx context.Context, tx pgx.Tx, org, event, seat string) (p place, err error) {
	if err := selling(ctx, tx, org, event); err != nil {
		return p, err
	}
	var status string
	err = tx.QueryRow(ctx, seatSQL, seat, event, org).Scan(&p.Section, &p.Row, &p.Number, &p.block, &p.limit, &status)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return p, errNotFound
	case err == nil && status != "published":
		return p, errNotOpen
	}
	return p, err
}

// hold holds a seat for whoever asks: the seat, a place of its block's capacity and the user's allowance, with a cleanup
// job and the history, all or none of them. Who holds the seat already gets the same hold, and is charged nothing.
//
// EarlyRelease, since the sections are hot: a commit that notifies would otherwise keep all others of the database waiting
// for the disk. The browsers may see the hold a moment before it is durable; its answer comes after that.
func (a *app) hold(ctx context.Context, r request) (metered.Outcome[place], error) {
	return metered.Do(ctx, a.metered, metered.Command{
		ID: r.operation, Namespace: r.who.namespace(), Name: "hold", Input: []string{r.event, r.seat}, EarlyRelease: true,
	}, func(ctx context.Context, tx *metered.Tx) (place, error) {
		p, err := openSeat(ctx, tx, r.who.Org, r.event, r.seat)
		if err != nil {
			return place{}, err
		}
		_, err = tx.Claim(ctx, holds.Claim{
			Tenant: r.who.Org, Key: seatKey(r.seat), Holder: r.who.User,
			Lines: []holds.Line{{
				Scope: budget.ScopeKey("block", p.block, ""), Amount: 1,
				Limits: []budget.Limit{budget.Lifetime(p.limit)},
			}},
			Charges: []budget.Charge{{
				Scope: budget.ScopeKey("holds", r.who.User, ""), Amount: 1, Limits: []budget.Limit{perUser},
			}},
			TTL: a.cfg.holdFor, Note: r.note(""),
		}, &holdjobs.Cleanup{})
		return p, err
	})
}

func (a *app) serveHold(w http.ResponseWriter, r request) error {
	out, err := a.hold(r.Context(), r)
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
	return reply(w, status, heldSeat{
		HoldID: h.ID, EventID: r.event, SeatID: r.seat, place: out.Result, Status: string(h.State),
		HeldUntil: h.Deadline, ExpiresInSeconds: int64(h.Remaining() / time.Second),
	})
}

// serveCancel gives a hold up.
func (a *app) serveCancel(w http.ResponseWriter, r request) error {
	_, err := metered.Do(r.Context(), a.metered, metered.Command{
		ID: r.operation, Namespace: r.who.namespace(), Name: "cancel", Input: r.hold, EarlyRelease: true,
	}, func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Release(holds.Release{Tenant: r.who.Org, IDs: []string{r.hold}, Holder: r.who.User, Note: r.note("cancelled")})
	})
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, map[string]string{"hold_id": r.hold, "status": "released"})
}

// serveOneHold tells what is and was with a hold: its holder, and an admin.
func (a *app) serveOneHold(w http.ResponseWriter, r request) error {
	holder := r.who.User
	if r.who.Admin {
		holder = ""
	}
	h, err := a.metered.Holds.Get(r.Context(), a.pool, r.who.Org, r.hold, holder)
	if err != nil {
		return err
	}
	events, err := a.metered.Holds.History(r.Context(), a.pool, r.who.Org, r.hold, holder)
	if err != nil {
		return err
	}
	type event struct {
		Kind holds.EventKind `json:"kind"`
		At   time.Time       `json:"at"`
	}
	history := []event{}
	for _, e := range events {
		history = append(history, event{e.Kind, e.At})
	}
	return reply(w, http.StatusOK, map[string]any{
		"hold_id": h.ID, "seat_id": h.Claim.Value, "status": h.State, "held_until": h.Deadline,
		"expires_in_seconds": int64(h.Remaining() / time.Second), "history": history,
	})
}

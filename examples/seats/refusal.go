package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httplimit"
)

// refusal is one of the application's own.
type refusal struct {
	status       int
	code, detail string
}

func (e *refusal) Error() string { return e.code + ": " + e.detail }

var (
	errNoSession = &refusal{http.StatusUnauthorized, "no_session", "Please sign in."}
	errNotAdmin  = &refusal{http.StatusForbidden, "not_allowed", "Only the box office may do that."}
	// The same for what does not exist and for what is another organisation's.
	errNotFound = &refusal{http.StatusNotFound, "not_found", "There is no such thing."}
	errNotOpen  = &refusal{http.StatusConflict, "event_not_open", "Seats of this event are not on sale."}
	errSold     = &refusal{http.StatusConflict, "seat_sold", "The seat is sold."}
	errDeclined = &refusal{http.StatusPaymentRequired, "payment_declined", "The payment was declined."}
	errChanged  = &refusal{http.StatusConflict, "changed", "It has changed meanwhile. Try again."}
)

func badRequest(why string) error { return &refusal{http.StatusBadRequest, "bad_request", why} }

// words are what people are told of the library's errors, by their codes.
var words = map[string]string{
	"seat_taken":         "This seat is taken.",
	"seat_held":          "Somebody else is holding this seat.",
	"block_full":         "No more seats of this section are sold.",
	"too_many_holds":     "That were many seats in a short time.",
	"hold_expired":       "The hold has run out.",
	"hold_captured":      "The hold has ended.",
	"hold_released":      "The hold has ended.",
	"hold_returned":      "The hold has ended.",
	"operation_conflict": "The Idempotency-Key was used for another request.",
	"operation_retired":  "The Idempotency-Key is too old.",
	"invalid_argument":   "The request cannot be carried out.",
	"operation_future":   "The request cannot be carried out.",
}

// explain says what an error is in HTTP: what the library decides, with codes and words of a hall.
func explain(err error) httplimit.Problem {
	var own *refusal
	if errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired) {
		own = errNotFound
	}
	if own != nil || errors.As(err, &own) {
		return httplimit.Problem{Title: http.StatusText(own.status), Status: own.status, Code: own.code, Detail: own.detail}
	}
	p := httplimit.ProblemOf(err)
	switch {
	case p.Code == "claim_taken" && p.RetryAfterSeconds > 0:
		p.Code = "seat_held"
	case p.Code == "claim_taken":
		p.Code = "seat_taken"
	case p.Status == http.StatusTooManyRequests: // perUser: somebody is in too much of a hurry
		p.Code = "too_many_holds"
	case p.Code == "budget_exceeded": // also of a section without any seat, which is no want of credit
		p.Code, p.Status, p.Title = "block_full", http.StatusConflict, http.StatusText(http.StatusConflict)
	}
	p.Detail = words[p.Code]
	return p
}

func refuse(w http.ResponseWriter, operation string, err error) {
	p := explain(err)
	if p.Status == http.StatusServiceUnavailable { // which finds out what became of the first
		p.Detail = "Not known yet: repeat the request with this Idempotency-Key."
		w.Header().Set("Idempotency-Key", operation)
	}
	p.Write(w)
	if p.Status >= http.StatusInternalServerError {
		slog.Warn("not answered", "operation", operation, "status", p.Status, "error", err)
	}
}

const refusedSQL = `
insert into hall.audit (org, actor, action, code, event, seat, hold, operation, remote)
values ($1, $2, $3, $4, nullif($5, '')::uuid, nullif($6, '')::uuid, nullif($7, ''), $8, $9)`

// recordRefusal writes a refusal down, when the transaction that it ended is gone. What is not known yet is none.
func (a *app) recordRefusal(r request, action string, err error) {
	problem := explain(err)
	if problem.Status >= http.StatusInternalServerError {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 2*time.Second) // the client may have gone
	defer cancel()
	_, writeErr := a.pool.Exec(ctx, refusedSQL, r.who.Org, holds.User(r.who.User), action, problem.Code, r.event, r.seat, r.hold, r.operation, r.remote())
	if writeErr != nil {
		slog.Error("a refusal could not be recorded", "operation", r.operation, "action", action, "code", problem.Code, "error", writeErr)
	}
}

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// refusal is the body of an answer that is not what was asked for.
type refusal struct {
	Status  int    `json:"status"`
	Code    string `json:"code"`
	Message string `json:"message"`
	// RetryAfterSeconds is Retry-After.
	RetryAfterSeconds int64 `json:"retry_after_seconds,omitempty"`
	// Operation is what to repeat the request with.
	Operation string `json:"operation,omitempty"`
}

func (e *refusal) Error() string { return e.Code + ": " + e.Message }

var (
	errNoSession = &refusal{Status: http.StatusUnauthorized, Code: "no_session", Message: "Please sign in."}
	errNotAdmin  = &refusal{Status: http.StatusForbidden, Code: "not_allowed", Message: "Only the box office may do that."}
	// The same for what does not exist and for what is another organisation's.
	errNotFound = &refusal{Status: http.StatusNotFound, Code: "not_found", Message: "There is no such thing."}
	errNotOpen  = &refusal{Status: http.StatusConflict, Code: "event_not_open", Message: "Seats of this event are not on sale."}
	errSold     = &refusal{Status: http.StatusConflict, Code: "seat_sold", Message: "The seat is sold."}
	errDeclined = &refusal{Status: http.StatusPaymentRequired, Code: "payment_declined", Message: "The payment was declined."}
	errChanged  = &refusal{Status: http.StatusConflict, Code: "changed", Message: "It has changed meanwhile. Try again."}
)

func badRequest(why string) error {
	return &refusal{Status: http.StatusBadRequest, Code: "bad_request", Message: why}
}

// explain says what an error is in HTTP. Nothing of its text gets out: it names scopes and holders.
func explain(err error) refusal {
	var r *refusal
	var taken *holds.TakenError
	var exceeded *budget.ExceededError
	switch {
	case errors.As(err, &r):
		return *r
	case errors.As(err, &taken) && taken.Confirmed:
		return refusal{Status: http.StatusConflict, Code: "seat_taken", Message: "This seat is taken."}
	case errors.As(err, &taken):
		return refusal{Status: http.StatusConflict, Code: "seat_held", Message: "Somebody else is holding this seat.", RetryAfterSeconds: seconds(taken.RetryAfter)}
	case errors.As(err, &exceeded):
		return exceededLimit(exceeded)
	}
	switch code := metered.Code(err); code {
	case "hold_unknown", "hold_retired":
		return *errNotFound
	case "hold_expired":
		return refusal{Status: http.StatusConflict, Code: code, Message: "The hold has run out."}
	case "hold_captured", "hold_released", "hold_returned":
		return refusal{Status: http.StatusConflict, Code: code, Message: "The hold has ended."}
	case "operation_conflict", "operation_retired":
		return refusal{Status: http.StatusConflict, Code: code, Message: "The Idempotency-Key was used for another request, or is too old."}
	case "invalid_argument", "operation_future":
		return refusal{Status: http.StatusBadRequest, Code: "bad_request", Message: "The request cannot be carried out."}
	}
	if metered.Retryable(err) {
		return notKnown(cmp.Or(metered.Code(err), "unavailable"))
	}
	return refusal{Status: http.StatusInternalServerError, Code: "internal", Message: "Something went wrong."}
}

// exceededLimit tells a full block, which nobody but the box office can change, from a user in too much of a hurry.
func exceededLimit(e *budget.ExceededError) refusal {
	for _, r := range e.Refusals {
		if r.Limit.Name != perUser.Name {
			return refusal{Status: http.StatusConflict, Code: "block_full", Message: "No more seats of this section are sold."}
		}
	}
	after, _ := e.RetryAfterSeconds()
	return refusal{
		Status: http.StatusTooManyRequests, Code: "too_many_holds", RetryAfterSeconds: max(after, 1),
		Message: "That were many seats in a short time.",
	}
}

// notKnown is an answer of which the client does not know whether the request was carried out. The same request with the
// same key finds that out.
func notKnown(code string) refusal {
	return refusal{Status: http.StatusServiceUnavailable, Code: code, Message: "Not known yet: repeat the request.", RetryAfterSeconds: 1}
}

// seconds rounds up: after that many the time is over.
func seconds(d time.Duration) int64 { return max(1, int64((d+time.Second-1)/time.Second)) }

func refuse(w http.ResponseWriter, operation string, err error) {
	r := explain(err)
	if r.Status >= http.StatusInternalServerError {
		r.Operation = operation
		slog.Warn("not answered", "operation", operation, "code", r.Code, "error", err)
	}
	if r.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(r.RetryAfterSeconds, 10))
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(r.Status)
	_ = json.NewEncoder(w).Encode(struct {
		Title string `json:"title"`
		refusal
	}{http.StatusText(r.Status), r})
}

const refusedSQL = `
insert into hall.audit (org, actor, action, code, event, seat, hold, operation, remote)
values ($1, $2, $3, $4, nullif($5, '')::uuid, nullif($6, '')::uuid, nullif($7, ''), $8, $9)`

// recordRefusal writes a refusal down, when the transaction that it ended is gone. What is not known yet is none.
func (a *app) recordRefusal(r request, action string, err error) {
	code := explain(err).Code
	if explain(err).Status >= http.StatusInternalServerError {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 2*time.Second) // the client may have gone
	defer cancel()
	_, writeErr := a.pool.Exec(ctx, refusedSQL, r.who.Org, holds.User(r.who.User), action, code, r.event, r.seat, r.hold, r.operation, r.remote())
	if writeErr != nil {
		slog.Error("a refusal could not be recorded", "operation", r.operation, "action", action, "code", code, "error", writeErr)
	}
}

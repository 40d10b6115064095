package main

import (
	"cmp"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"time"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
)

// refusal is one of the application's own.
type refusal = httpmetered.Problem

// conflict is a refusal by the present state of something.
func conflict(code, detail string) *refusal {
	return &refusal{Status: http.StatusConflict, Code: code, Detail: detail}
}

// seconds are whole ones, and not too few.
func seconds(d time.Duration) int64 { return int64(math.Ceil(d.Seconds())) }

var (
	errNoSession  = &refusal{Status: http.StatusUnauthorized, Code: "no_session", Detail: "Please sign in."}
	errNotAllowed = &refusal{Status: http.StatusForbidden, Code: "not_allowed", Detail: "You may not do that."}
	// The same for things that do not exist and for another organisation's.
	errNotFound = &refusal{Status: http.StatusNotFound, Code: "not_found", Detail: "There is no such thing."}
	errNoBody   = badRequest("the body is empty")

	errDraft      = conflict("event_draft", "This event is not on sale.")
	errCancelled  = conflict("event_cancelled", "This event is cancelled.")
	errNotLive    = conflict("event_not_live", "The doors are not open yet.")
	errSaleClosed = conflict("sale_closed", "The sale has ended.")

	errSold    = conflict("seat_sold", "This seat is sold.")
	errBlocked = conflict("seat_blocked", "This seat is not for sale.")
	errChanged = conflict("changed", "It has changed meanwhile. Try again.")
)

func badRequest(why string) *refusal {
	return &refusal{Status: http.StatusBadRequest, Code: "bad_request", Detail: why}
}

// words are texts for people on the library's errors, by their codes.
var words = map[string]string{
	"block_full":         "No more seats of this section are sold.",
	"too_many_holds":     "That were many seats in a short time.",
	"hold_expired":       "The hold has run out.",
	"hold_conflict":      "You hold this seat already, in another way.",
	"hold_captured":      "The hold has ended.",
	"hold_released":      "The hold has ended.",
	"hold_returned":      "The hold has ended.",
	"operation_conflict": "The Idempotency-Key was used for another request.",
	"operation_retired":  "The Idempotency-Key is too old.",
	"invalid_argument":   "The request cannot be carried out.",
	"operation_future":   "The request cannot be carried out.",
}

// explain decides an error's HTTP answer: the library's, with codes and words of a hall.
func explain(err error) httpmetered.Problem {
	if errors.Is(err, holds.ErrUnknown) || errors.Is(err, holds.ErrRetired) {
		err = errNotFound
	}
	p := httpmetered.ProblemOf(err)
	switch {
	case p.Status == http.StatusTooManyRequests: // perUser: somebody is in too much of a hurry
		p.Code = "too_many_holds"
	case p.Code == "budget_exceeded": // also of a section without any seat, which is no want of credit
		p.Code, p.Status, p.Title = "block_full", http.StatusConflict, http.StatusText(http.StatusConflict)
	}
	p.Detail = cmp.Or(p.Detail, words[p.Code])
	return p
}

func refuse(w http.ResponseWriter, operation string, err error) {
	p := explain(err)
	if p.Status == http.StatusServiceUnavailable { // it finds out the outcome of the first
		p.Detail = "Not known yet: repeat the request with this Idempotency-Key."
		w.Header().Set("Idempotency-Key", operation)
	}
	p.Write(w)
	if p.Status >= http.StatusInternalServerError {
		slog.Warn("not answered", "operation", operation, "status", p.Status, "error", err)
	}
}

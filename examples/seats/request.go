package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"regexp"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
)

// requestTimeout bounds a request, payment aside. If the outcome of a lost COMMIT is unknown by then, the answer is a
// 503.
const requestTimeout = 10 * time.Second

// action is a kind of request.
type action struct {
	name  string // in the audit table, whether it is done or refused
	needs role
	serve func(http.ResponseWriter, *request) error
}

// handler serves the page and these, to each role what it may do, with the bodies that they take. A request that changes
// something needs an Idempotency-Key: repeated with it, after a lost answer, it gets the same answer.
func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, act := range map[string]action{
		"GET /api/events/{event}/map":                   {"map", customer, a.serveMap},
		"GET /api/events/{event}/stream":                {"stream", customer, a.serveStream}, // the map, whenever it changes
		"POST /api/events/{event}/seats/{seat}/hold":    {"hold", customer, a.serveHold},     // {"source": "web"}
		"DELETE /api/holds/{hold}":                      {"cancel", customer, a.serveCancel},
		"POST /api/events/{event}/checkout":             {"checkout", customer, a.serveCheckout}, // {"holds": ["…"]}
		"POST /api/events/{event}/seats/{seat}/block":   {"block", boxOffice, a.serveBlock},
		"POST /api/events/{event}/seats/{seat}/unblock": {"unblock", boxOffice, a.serveUnblock},
		"PUT /api/events/{event}/blocks/{block}":        {"capacity", manager, a.serveCapacity}, // {"capacity": 80}
		"PUT /api/events/{event}":                       {"sale", manager, a.serveSale},         // {"status": "published", "opens": "…", "closes": "…"}
	} {
		mux.HandleFunc(pattern, a.api(act))
	}
	a.pages(mux)
	return secured(http.NewCrossOriginProtection().Handler(mux))
}

// request is a request whose parts are checked.
type request struct {
	*http.Request
	who                      session
	event, seat, block, hold string
	operation                string
	action                   string
	asked                    any // its body
}

var (
	uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	holdForm = regexp.MustCompile(`^claim_[0-9a-f]{32}_[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
)

// api checks a request before it is carried out: the ids before anything reaches the database, then the session and the
// user's role. Failures of requests that change something go to the audit table.
func (a *app) api(act action) http.HandlerFunc {
	return func(w http.ResponseWriter, raw *http.Request) {
		r := &request{Request: raw, action: act.name}
		if raw.Method != http.MethodGet { // a stream has no end
			ctx, cancel := context.WithTimeout(raw.Context(), requestTimeout+a.cfg.payTakes)
			defer cancel()
			r.Request = raw.WithContext(r.asking(ctx))
		}
		err := a.serve(w, r, act)
		if err == nil {
			return
		}
		if raw.Method != http.MethodGet {
			a.recordFailure(r, err)
		}
		refuse(w, r.operation, err)
	}
}

func (a *app) serve(w http.ResponseWriter, r *request, act action) error {
	err := r.read()
	if err != nil {
		return err
	}
	if r.who, err = a.user(r.Request); err != nil {
		return err
	}
	if !r.who.Role.may(act.needs) {
		return errNotAllowed
	}
	return act.serve(w, r)
}

// read looks at the ids. Those that are none are left out.
func (r *request) read() (err error) {
	for name, id := range map[string]*string{"event": &r.event, "seat": &r.seat, "block": &r.block, "hold": &r.hold} {
		given, form := r.PathValue(name), uuidForm
		if name == "hold" {
			form = holdForm
		}
		if given != "" && !form.MatchString(given) {
			return badRequest(name + " is not an id")
		}
		*id = given
	}
	r.operation, err = httpmetered.OptionalKey(r.Request)
	return err
}

// decode reads a request's body, and refuses unknown fields and text after it. errNoBody is an empty body.
func decode(w http.ResponseWriter, r *request, into any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 16<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(into); errors.Is(err, io.EOF) {
		return errNoBody
	} else if err != nil {
		return badRequest("the body is not as documented")
	}
	r.asked = into
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return badRequest("the body goes on")
	}
	return nil
}

// note is recorded with all changes of the request, in the ledger and in the history of holds.
func (r *request) note(reason string) budget.Note {
	return budget.Note{Actor: "user:" + r.who.User, Tenant: r.who.Org, Correlation: r.operation, Reason: reason}
}

func reply(w http.ResponseWriter, status int, body any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // it fails if the client has gone
	return nil
}

// secured sets the headers of every answer. No cache keeps one.
func secured(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

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

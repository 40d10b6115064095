package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
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

// handler serves the page and these. Some need the right to sell or to manage:
//
//	GET    /api/events/{event}/map                      the seats, and one's own holds
//	GET    /api/events/{event}/stream                   the same, whenever it changes
//	POST   /api/events/{event}/seats/{seat}/hold        {"source": "web"}
//	DELETE /api/holds/{hold}
//	POST   /api/events/{event}/checkout                 {"holds": ["…"]}
//	sell   /api/events/{event}/seats/{seat}/block       POST, and …/unblock
//	manage /api/events/{event}/blocks/{block}           PUT {"capacity": 80}
//	manage /api/events/{event}                          PUT {"status": "published", "opens": "…", "closes": "…"}
//
// A request that changes something needs an Idempotency-Key: repeated with it, after a lost answer, it gets the same
// answer.
func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, act := range map[string]action{
		"GET /api/events/{event}/map":                   {"map", customer, a.serveMap},
		"GET /api/events/{event}/stream":                {"stream", customer, a.serveStream},
		"POST /api/events/{event}/seats/{seat}/hold":    {"hold", customer, a.serveHold},
		"DELETE /api/holds/{hold}":                      {"cancel", customer, a.serveCancel},
		"POST /api/events/{event}/checkout":             {"checkout", customer, a.serveCheckout},
		"POST /api/events/{event}/seats/{seat}/block":   {"block", boxOffice, a.serveBlock},
		"POST /api/events/{event}/seats/{seat}/unblock": {"unblock", boxOffice, a.serveUnblock},
		"PUT /api/events/{event}/blocks/{block}":        {"capacity", manager, a.serveCapacity},
		"PUT /api/events/{event}":                       {"sale", manager, a.serveSale},
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

// api checks a request before it is carried out: the cookie and the ids before anything reaches the database, then
// the session and the user's role. Failures of requests that change something go to the audit table.
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
	cookie, err := r.Cookie(sessionCookie)
	if err != nil {
		return errNoSession
	}
	if err := r.read(); err != nil {
		return err
	}
	if r.who, err = a.signedIn(r.Context(), cookie); err != nil {
		return err
	}
	if !r.who.Role.may(act.needs) {
		return errNotAllowed
	}
	return act.serve(w, r)
}

// read looks at the ids. Those that are none are left out.
func (r *request) read() (err error) {
	for name, id := range map[string]*string{"event": &r.event, "seat": &r.seat, "block": &r.block} {
		given := r.PathValue(name)
		if given != "" && !uuidForm.MatchString(given) {
			return badRequest(name + " is not an id")
		}
		*id = given
	}
	if given := r.PathValue("hold"); given == "" || holdForm.MatchString(given) {
		r.hold = given
	} else {
		return badRequest("hold is not an id")
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
	return budget.Note{Actor: holds.User(r.who.User), Tenant: r.who.Org, Correlation: r.operation, Reason: reason}
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

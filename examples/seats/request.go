package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"regexp"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// requestTimeout bounds a request, payment aside. What cannot be found out about a lost COMMIT by then is a 503.
const requestTimeout = 10 * time.Second

// handler serves the page and
//
//	GET    /api/events/{event}/map                      the seats, and one's own holds
//	GET    /api/events/{event}/stream                   the same, whenever it changes
//	POST   /api/events/{event}/seats/{seat}/hold
//	GET    /api/events/{event}/seats/{seat}/history
//	GET    /api/holds/{hold}
//	DELETE /api/holds/{hold}
//	POST   /api/events/{event}/checkout                 {"holds": ["…"]}
//
// and for admins
//
//	POST   /api/events/{event}/seats/{seat}/block
//	POST   /api/events/{event}/seats/{seat}/unblock
//	PUT    /api/events/{event}/blocks/{block}           {"capacity": 80}
//	PUT    /api/events/{event}                          {"status": "closed"}
//
// What changes something takes an Idempotency-Key: repeated with it, because the answer was lost, it is answered again
// and not done again.
func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, serve := range map[string]func(http.ResponseWriter, request) error{
		"GET /api/events/{event}/map":                  a.serveMap,
		"GET /api/events/{event}/stream":               a.serveStream,
		"POST /api/events/{event}/seats/{seat}/hold":   a.serveHold,
		"GET /api/events/{event}/seats/{seat}/history": a.serveHistory,
		"GET /api/holds/{hold}":                        a.serveOneHold,
		"DELETE /api/holds/{hold}":                     a.serveCancel,
		"POST /api/events/{event}/checkout":            a.serveCheckout,

		"POST /api/events/{event}/seats/{seat}/block":   forAdmins(a.serveBlock),
		"POST /api/events/{event}/seats/{seat}/unblock": forAdmins(a.serveUnblock),
		"PUT /api/events/{event}/blocks/{block}":        forAdmins(a.serveCapacity),
		"PUT /api/events/{event}":                       forAdmins(a.serveStatus),
	} {
		mux.HandleFunc(pattern, a.api(pattern, serve))
	}
	a.pages(mux)
	return http.NewCrossOriginProtection().Handler(secured(mux))
}

// request is a request whose parts have been looked at.
type request struct {
	*http.Request
	who                      session
	event, seat, block, hold string
	operation                string
}

var (
	uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	holdForm = regexp.MustCompile(`^claim_[0-9a-f]{32}_[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	keyForm  = regexp.MustCompile(`^[!-~]{1,255}$`)
)

// api checks a request before it reaches the database: the session, then the ids. Refusals of what changes something are
// written to the audit table.
func (a *app) api(pattern string, serve func(http.ResponseWriter, request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, raw *http.Request) {
		r, err := a.read(raw)
		if err == nil {
			if raw.Method != http.MethodGet { // a stream has no end
				ctx, cancel := context.WithTimeout(raw.Context(), requestTimeout+a.cfg.payTakes)
				defer cancel()
				r.Request = raw.WithContext(ctx)
			}
			if err = a.known(r.Context(), &r.who); err == nil {
				err = serve(w, r)
			}
			if err != nil && raw.Method != http.MethodGet {
				a.recordRefusal(r, pattern, err)
			}
		}
		if err != nil {
			refuse(w, r.operation, err)
		}
	}
}

func (a *app) read(raw *http.Request) (r request, err error) {
	r = request{Request: raw, operation: raw.Header.Get("Idempotency-Key")}
	if r.who, err = a.signedIn(raw); err != nil {
		return r, err
	}
	for name, id := range map[string]*string{"event": &r.event, "seat": &r.seat, "block": &r.block} {
		if *id = raw.PathValue(name); *id != "" && !uuidForm.MatchString(*id) {
			return r, badRequest(name + " is not an id")
		}
	}
	if r.hold = raw.PathValue("hold"); r.hold != "" && !holdForm.MatchString(r.hold) {
		return r, badRequest("hold is not an id")
	}
	if r.operation == "" {
		r.operation = metered.NewID()
	} else if !keyForm.MatchString(r.operation) {
		return r, badRequest("the Idempotency-Key cannot be used")
	}
	return r, nil
}

// decode reads a request's body, which has to be what is expected and no more.
func decode(w http.ResponseWriter, r request, into any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 16<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return badRequest("the body is not what it should be")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return badRequest("the body goes on")
	}
	return nil
}

// note is recorded with whatever the request does, in the ledger and in the history of holds.
func (r request) note(reason string) budget.Note {
	return budget.Note{Actor: holds.User(r.who.User), Tenant: r.who.Org, Correlation: r.operation, Reason: reason}
}

// remote is the address of who asks.
func (r request) remote() string {
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	return host
}

func reply(w http.ResponseWriter, status int, body any) error {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // it fails if the client has gone
	return nil
}

// secured sets what every answer has.
func secured(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		next.ServeHTTP(w, r)
	})
}

package main

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// fake is the part of Stripe that takes meter events, as its documentation describes it: it knows
// an identifier for 24 hours, takes whole numbers, times of the last 35 days and up to 5 minutes
// ahead, and one call at a time for a customer. It looks for the customer after it has answered.
type fake struct {
	key string
	now func() time.Time
	// breaks makes a call fail: before the event counts, or after.
	breaks func() (before, after bool)

	mu     sync.Mutex
	known  map[string]time.Time
	sums   map[string]int64 // by customer
	busy   map[string]bool
	calls  int
	queued int // calls of a customer beside another one
	// reported are identifiers that an event v1.billing.meter.error_report_triggered would have.
	reported []string
}

func newFake(key string, now func() time.Time) *fake {
	return &fake{key: key, now: now, known: map[string]time.Time{}, sums: map[string]int64{}, busy: map[string]bool{},
		breaks: func() (bool, bool) { return false, false }}
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	customer := r.PostFormValue("payload[stripe_customer_id]")
	f.mu.Lock()
	f.calls++
	if f.busy[customer] {
		f.queued++
		f.mu.Unlock()
		refuse(w, http.StatusTooManyRequests, "lock_timeout", "another call for the customer is under way")
		return
	}
	f.busy[customer] = true
	f.mu.Unlock()
	status, code, message := f.take(r, customer)
	f.mu.Lock()
	delete(f.busy, customer)
	f.mu.Unlock()
	if status != http.StatusOK {
		refuse(w, status, code, message)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"object": "billing.meter_event", "identifier": r.PostFormValue("identifier")})
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]string{"type": "invalid_request_error", "code": code, "message": message}})
}

func (f *fake) take(r *http.Request, customer string) (status int, code, message string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, after := f.breaks()
	id := r.PostFormValue("identifier")
	value, wrong := strconv.ParseInt(r.PostFormValue("payload[value]"), 10, 64)
	seconds, noTime := strconv.ParseInt(r.PostFormValue("timestamp"), 10, 64)
	age := f.now().Sub(time.Unix(seconds, 0))
	user, _, _ := r.BasicAuth()
	bad := http.StatusBadRequest
	switch at, known := f.known[id]; {
	case before:
		return http.StatusInternalServerError, "", "an error on Stripe's end"
	case r.Method != http.MethodPost || r.URL.Path != "/v1/billing/meter_events":
		return http.StatusNotFound, "", "unrecognized request URL"
	case user != f.key:
		return http.StatusUnauthorized, "", "invalid API key provided"
	case r.PostFormValue("event_name") == "" || id == "" || len(id) > 100:
		return bad, "parameter_invalid", "event_name or identifier"
	case customer == "":
		return bad, "parameter_missing", "payload[stripe_customer_id]"
	case wrong != nil:
		return bad, "meter_event_invalid_value", "the value is no whole number"
	case noTime != nil || age > 35*24*time.Hour:
		return bad, "timestamp_too_far_in_past", "the timestamp is more than 35 days in the past"
	case age < -5*time.Minute:
		return bad, "timestamp_in_future", "the timestamp is more than 5 minutes in the future"
	case known && f.now().Sub(at) < 24*time.Hour:
		return bad, "", "An event already exists with identifier " + id + "."
	}
	f.known[id] = f.now()
	if strings.HasPrefix(customer, "cus_") {
		f.sums[customer] += value
	} else {
		f.reported = append(f.reported, id)
	}
	if after {
		return http.StatusBadGateway, "", "the answer was lost"
	}
	return http.StatusOK, "", ""
}

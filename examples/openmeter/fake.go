package main

import (
	"encoding/json"
	"net/http"
	"sync"
)

// fake is a receiver of batches of CloudEvents. It takes a batch whole or not at all, and counts an
// event once by its source and id, as OpenMeter says that it does.
type fake struct {
	key string
	// breaks makes a call fail: before the batch counts, or after.
	breaks func() (before, after bool)

	mu    sync.Mutex
	known map[[2]string]bool
	sums  map[string]int64 // by subject
	again int              // events that it had already
}

func newFake(key string) *fake {
	return &fake{key: key, known: map[[2]string]bool{}, sums: map[string]int64{},
		breaks: func() (bool, bool) { return false, false }}
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, after := f.breaks()
	var batch []event
	switch {
	case before:
		http.Error(w, "unavailable", http.StatusServiceUnavailable)
		return
	case r.Method != http.MethodPost || r.URL.Path != "/api/v1/events":
		http.Error(w, "no such path", http.StatusNotFound)
		return
	case r.Header.Get("Authorization") != "Bearer "+f.key:
		http.Error(w, "unauthorized", http.StatusUnauthorized)
		return
	case r.Header.Get("Content-Type") != "application/cloudevents-batch+json", json.NewDecoder(r.Body).Decode(&batch) != nil:
		http.Error(w, "no batch of CloudEvents", http.StatusBadRequest)
		return
	}
	for _, e := range batch {
		if e.SpecVersion != "1.0" || e.ID == "" || e.Source == "" || e.Type == "" || e.Subject == "" || e.Time.IsZero() {
			http.Error(w, "an attribute is missing", http.StatusBadRequest)
			return
		}
	}
	for _, e := range batch {
		name := [2]string{e.Source, e.ID}
		if f.known[name] {
			f.again++
			continue
		}
		f.known[name] = true
		f.sums[e.Subject] += e.Data.Units
	}
	if after {
		http.Error(w, "the answer was lost", http.StatusBadGateway)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

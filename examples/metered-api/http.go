package main

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/pgmetered/metered/httpmetered"
)

// accounts by their API keys. Yours come from a table, where only their digests are.
var accounts = map[string]string{"key-of-ann": "ann", "key-of-ben": "ben"}

// handler serves
//
//	POST /tasks {"number": 91}    202 with the task's id; 429 if its estimate does not fit
//	GET  /tasks/{id}              200; 404 for a task of another account, too
//
// both with Authorization: Bearer and an account's key. A POST with an Idempotency-Key can be sent again.
func (a *app) handler() (http.Handler, error) {
	policies, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: a.limits})
	if err != nil {
		return nil, err
	}
	once, err := httpmetered.Idempotent(a.metered, httpmetered.IdempotentConfig{
		Tenant:   func(r *http.Request) (string, error) { return accounts[apiKey(r)], nil },
		Optional: true, RequestBytes: 1024, Policies: policies,
	})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /tasks", a.authenticated(func(w http.ResponseWriter, r *http.Request, account string) {
		once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var request struct{ Number int64 }
			if err := json.NewDecoder(r.Body).Decode(&request); err != nil || request.Number < 2 {
				refuse(w, http.StatusBadRequest, `want {"number": n}, from 2 to 9223372036854775807`)
				return
			}
			done, err := a.submit(r.Context(), httpmetered.Tx(r), account, request.Number)
			if err != nil {
				fail(w, r, policies, err)
				return
			}
			w.Header().Set("Location", "/tasks/"+done.ID)
			answer(w, http.StatusAccepted, done)
		})).ServeHTTP(w, r)
	}))
	mux.HandleFunc("GET /tasks/{id}", a.authenticated(func(w http.ResponseWriter, r *http.Request, account string) {
		s, err := a.status(r.Context(), account, r.PathValue("id"))
		if err != nil {
			fail(w, r, policies, err)
			return
		}
		answer(w, http.StatusOK, s)
	}))
	return http.TimeoutHandler(mux, requestTimeout, ""), nil
}

// requestTimeout bounds a request and all its waits.
const requestTimeout = 10 * time.Second

func apiKey(r *http.Request) string {
	key, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return key
}

func (a *app) authenticated(serve func(http.ResponseWriter, *http.Request, string)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		account, known := accounts[apiKey(r)]
		if !known {
			w.Header().Set("WWW-Authenticate", "Bearer")
			refuse(w, http.StatusUnauthorized, "want an API key")
			return
		}
		serve(w, r, account)
	}
}

// fail answers an error. With the same key a request that got a 503 can be sent again.
func fail(w http.ResponseWriter, r *http.Request, policies *httpmetered.Policies, err error) {
	if status := policies.Write(w, err); status >= http.StatusInternalServerError {
		slog.ErrorContext(r.Context(), r.Pattern, "status", status, "error", err)
	}
}

func refuse(w http.ResponseWriter, status int, detail string) {
	httpmetered.Problem{Title: http.StatusText(status), Status: status, Detail: detail}.Write(w)
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

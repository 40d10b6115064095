package main

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"log/slog"
	"math"
	"net/http"
	"time"

	"github.com/pgmetered/metered/httpmetered"
)

// handler serves
//
//	POST   /claims              {"email": "…"}   201, or 200 for the visitor's own claim; 409 if it is taken
//	POST   /claims/{id}/confirm {"name": "…"}    201, also when it is sent again; 409 if it is too late
//	DELETE /claims/{id}                          204
//
// The cookie identifies the visitor. Another visitor's claim is a 404, like one that does not exist.
func (s *signup) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /claims", s.serveClaim)
	mux.HandleFunc("POST /claims/{id}/confirm", s.serveConfirm)
	mux.HandleFunc("DELETE /claims/{id}", s.serveCancel)
	return http.NewCrossOriginProtection().Handler(http.TimeoutHandler(mux, requestTimeout, ""))
}

// requestTimeout bounds a request and all its waits.
const requestTimeout = 10 * time.Second

// claimed is a claim as its visitor sees it.
type claimed struct {
	ID        string    `json:"id"`
	Email     string    `json:"email"`
	HeldUntil time.Time `json:"held_until"`
	ExpiresIn int       `json:"expires_in_seconds"` // by the database's clock
}

func (s *signup) serveClaim(w http.ResponseWriter, r *http.Request) {
	var request struct{ Email string }
	if !read(w, r, &request) {
		return
	}
	h, err := s.claim(r.Context(), visitor(w, r), request.Email)
	var t typed
	if err == nil {
		t, err = typedIn(h)
	}
	if err != nil {
		refuse(w, r, err)
		return
	}
	status := http.StatusOK
	if h.Created {
		status = http.StatusCreated
	}
	answer(w, status, claimed{h.ID, t.Email, h.Deadline, int(math.Ceil(h.Remaining().Seconds()))})
}

func (s *signup) serveConfirm(w http.ResponseWriter, r *http.Request) {
	var request struct{ Name string }
	if !read(w, r, &request) {
		return
	}
	u, err := s.confirm(r.Context(), visitor(w, r), r.PathValue("id"), request.Name)
	if err != nil {
		refuse(w, r, err)
		return
	}
	answer(w, http.StatusCreated, u)
}

func (s *signup) serveCancel(w http.ResponseWriter, r *http.Request) {
	if err := s.cancel(r.Context(), visitor(w, r), r.PathValue("id")); err != nil {
		refuse(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

const cookieName = "visitor"

// visitor identifies the client: nobody can guess another one's cookie. With HTTPS make it Secure, and name it
// __Host-visitor.
func visitor(w http.ResponseWriter, r *http.Request) string {
	if c, err := r.Cookie(cookieName); err == nil && len(c.Value) == len(rand.Text()) {
		return c.Value
	}
	id := rand.Text()
	http.SetCookie(w, &http.Cookie{Name: cookieName, Value: id, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode})
	return id
}

// words are texts for visitors, by the code of an error.
var words = map[string]string{
	"hold_unknown":       "no such claim",
	"hold_expired":       "the claim has ended: claim the address again",
	"hold_released":      "the claim has ended: claim the address again",
	"hold_retired":       "the claim has ended: claim the address again",
	"hold_captured":      "the claim is confirmed already",
	"operation_conflict": "the claim is confirmed already",
}

// refuse says no more than the visitor may know.
func refuse(w http.ResponseWriter, r *http.Request, err error) {
	problem := httpmetered.ProblemOf(err)
	problem.Detail = cmp.Or(problem.Detail, words[problem.Code])
	switch problem.Code {
	case "operation_conflict": // the id is the claim's, and no Idempotency-Key
		problem.Status, problem.Title = http.StatusConflict, http.StatusText(http.StatusConflict)
	case "claim_taken":
		problem.Detail = "there is an account with this address"
		if problem.RetryAfterSeconds > 0 {
			problem.Detail = "somebody is signing up with this address"
		}
	}
	problem.Write(w)
	if problem.Status >= http.StatusInternalServerError {
		slog.ErrorContext(r.Context(), r.Pattern, "status", problem.Status, "error", err)
	}
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

var errBody = &httpmetered.Problem{Status: http.StatusBadRequest, Detail: "that is not the JSON that is expected here"}

func read(w http.ResponseWriter, r *http.Request, request any) bool {
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4096)).Decode(request)
	if err != nil {
		httpmetered.Write(w, errBody)
	}
	return err == nil
}

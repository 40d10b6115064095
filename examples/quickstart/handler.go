package main

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/pgmetered/metered/httpmetered"
)

const (
	maxContent = 32 << 20

	// commandTimeout bounds a command. If the outcome of a lost COMMIT is still unknown by then, the answer is a 503.
	commandTimeout = 10 * time.Second
)

// handler serves
//
//	POST /accounts/{account}/uploads/{name}
//	Authorization: Bearer <token>
//	Idempotency-Key: <operation id>
//
// with 201, or 200 for a repetition. A real service knows the account from its own session.
func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /accounts/{account}/uploads/{name}", a.serveUpload)
	return mux
}

func (a *app) serveUpload(w http.ResponseWriter, r *http.Request) {
	content, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxContent))
	if err != nil {
		refuse(w, "", err)
		return
	}
	operation, err := httpmetered.Key(r)
	if err != nil {
		refuse(w, "", err)
		return
	}
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	u := upload{
		Operation: operation, Account: r.PathValue("account"), Token: token, Name: r.PathValue("name"), Content: content,
	}
	ctx, cancel := context.WithTimeout(r.Context(), commandTimeout)
	defer cancel()
	out, err := a.upload(ctx, u)
	if r.Context().Err() != nil {
		return // the client has gone, and may ask again with the same key
	}
	if err != nil {
		refuse(w, u.Operation, err)
		return
	}
	status := http.StatusCreated
	if out.Replayed {
		status = http.StatusOK
	}
	reply(w, status, out.Raw) // the same for every repetition
}

// messages word errors for clients, by code. An error's own text names scopes, and stays inside. All faults of a
// token have one code and one status, so that whoever tries tokens learns nothing.
var messages = map[string]string{
	"token_invalid":      "the upload grant is not valid",
	"budget_exceeded":    "the account's plan has no room for it now",
	"operation_conflict": "the Idempotency-Key was used for another upload",
	"operation_retired":  "the Idempotency-Key is too old",
	"operation_future":   "the Idempotency-Key is of the future",
	"invalid_argument":   "the request is not valid",
}

func refuse(w http.ResponseWriter, operation string, err error) {
	problem := httpmetered.ProblemOf(err)
	problem.Detail = cmp.Or(messages[problem.Code], problem.Detail)
	if problem.Status == http.StatusServiceUnavailable { // the same request again is safe, and is the way to find out
		problem.Detail = "not known yet: repeat the request with the same Idempotency-Key"
	}
	problem.Write(w)
	if problem.Status == http.StatusInternalServerError {
		slog.Error("upload failed", "operation", operation, "error", err)
	}
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // it fails if the client has gone
}

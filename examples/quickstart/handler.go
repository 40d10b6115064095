package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

const (
	maxContent = 32 << 20

	// commandTimeout bounds a command. What it cannot find out about a lost COMMIT within this time is a 503.
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
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		reply(w, http.StatusRequestEntityTooLarge, failure{Code: "too_large", Message: err.Error()})
		return
	} else if err != nil {
		reply(w, http.StatusBadRequest, failure{Code: "bad_body", Message: "the body could not be read"})
		return
	}
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	u := upload{
		Operation: r.Header.Get("Idempotency-Key"), // without one: invalid_argument
		Account:   r.PathValue("account"), Token: token, Name: r.PathValue("name"), Content: content,
	}
	ctx, cancel := context.WithTimeout(r.Context(), commandTimeout)
	defer cancel()
	out, err := a.upload(ctx, u)
	if r.Context().Err() != nil {
		return // the client has gone; it may ask again with the same key
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

// failure is the body of a refusal.
type failure struct {
	Code      string `json:"code"`
	Message   string `json:"message"`
	Operation string `json:"operation,omitempty"`
	RetryIn   string `json:"retry_in,omitempty"`
}

// statusOf says what each error means in HTTP. All that can be wrong with a token is one code and one status, so that
// whoever tries tokens learns nothing.
func statusOf(err error) int {
	switch metered.Code(err) {
	case "token_invalid":
		return http.StatusForbidden
	case "budget_exceeded":
		return http.StatusTooManyRequests
	case "operation_conflict", "operation_retired":
		return http.StatusConflict
	case "invalid_argument", "operation_future":
		return http.StatusBadRequest
	}
	if metered.Retryable(err) {
		return http.StatusServiceUnavailable // the same request again is safe, and is the way to find out
	}
	return http.StatusInternalServerError
}

// messages say what an error is to whoever asks. Nothing of its own text gets out: it names scopes.
var messages = map[string]string{
	"token_invalid":      "the upload grant is not valid",
	"budget_exceeded":    "the account's plan has no room for it now",
	"operation_conflict": "the Idempotency-Key was used for another upload",
	"operation_retired":  "the Idempotency-Key is too old",
	"operation_future":   "the Idempotency-Key is of the future",
	"invalid_argument":   "the request is not valid; has it an Idempotency-Key?",
}

func refuse(w http.ResponseWriter, operation string, err error) {
	status := statusOf(err)
	f := failure{Code: metered.Code(err), Message: messages[metered.Code(err)]}
	switch status {
	case http.StatusTooManyRequests:
		var exceeded *budget.ExceededError
		if errors.As(err, &exceeded) {
			if seconds, ok := exceeded.RetryAfterSeconds(); ok {
				f.RetryIn = exceeded.RetryAfter().String()
				w.Header().Set("Retry-After", strconv.FormatInt(seconds, 10))
			}
		}
	case http.StatusServiceUnavailable:
		f.Code, f.Operation, f.Message = cmp.Or(f.Code, "unavailable"), operation, "not known yet: repeat the request with the same Idempotency-Key"
		w.Header().Set("Retry-After", "1")
	case http.StatusInternalServerError:
		f.Message = "internal error"
		slog.Error("upload failed", "operation", operation, "error", err)
	}
	reply(w, status, f)
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // it fails if the client has gone
}

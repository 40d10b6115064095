package httpmetered

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// QuotaExceeded is the draft's problem type for a limit over a window.
const QuotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// Problem is a refusal as problem details (RFC 9457). All members are optional;
// without Type, Title should be the text of the status.
type Problem struct {
	Type              string   `json:"type,omitempty"`
	Title             string   `json:"title,omitempty"`
	Status            int      `json:"status,omitempty"`
	Detail            string   `json:"detail,omitempty"`              // for whoever asked, in words of yours
	Code              string   `json:"code,omitempty"`                // the stable code of the error: see metered.Code
	RetryAfterSeconds int64    `json:"retry_after_seconds,omitempty"` // 0 means that there is no Retry-After
	ViolatedPolicies  []string `json:"violated-policies,omitempty"`   // the names of the policies that refused
}

// Write answers with the problem and its Status, 500 if it has none, and sets Retry-After.
// No cache keeps it, as RFC 6585 demands of a 429.
func (p Problem) Write(w http.ResponseWriter) {
	if p.Status == 0 {
		p.Status = http.StatusInternalServerError
	}
	body, err := json.Marshal(p)
	if err != nil { // strings and numbers: it cannot be
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
		return
	}
	w.Header().Del("Retry-After") // what was set before is not left to stand
	if p.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(p.RetryAfterSeconds, 10))
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // it fails if the client has gone
}

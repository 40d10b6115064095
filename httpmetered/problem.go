package httpmetered

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
)

// quotaExceeded is the draft's problem type for a limit over a window.
const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// Problem is a refusal as problem details.
type Problem struct {
	// Type is a URI that names the kind of problem, as RFC 9457 has it.
	Type string `json:"type,omitempty"`

	// Title says in a few words which kind of problem it is.
	Title string `json:"title,omitempty"`

	// Status is the HTTP status of the answer.
	Status int `json:"status,omitempty"`

	// Detail says it in your words.
	Detail string `json:"detail,omitempty"`

	// Code is the stable code of the error: see metered.Code.
	Code string `json:"code,omitempty"`

	// RetryAfterSeconds is the Retry-After of the answer. 0 is none.
	RetryAfterSeconds int64 `json:"retry_after_seconds,omitempty"`

	// ViolatedPolicies are the policies that refused.
	ViolatedPolicies []string `json:"violated-policies,omitempty"`

	// Operation is the id of the command, if its outcome is not known.
	Operation string `json:"operation,omitempty"`

	// Extra are members of your own. They win over those above. They are left out if they cannot
	// be JSON.
	Extra map[string]any `json:"-"`
}

// Error makes a Problem an error.
func (p *Problem) Error() string {
	return fmt.Sprintf("httpmetered: %d %s", p.Status, cmp.Or(p.Detail, p.Title, p.Code))
}

func (p Problem) MarshalJSON() ([]byte, error) {
	type plain Problem
	b, err := json.Marshal(plain(p))
	if err != nil || len(p.Extra) == 0 {
		return b, err
	}
	var members map[string]any
	if err := json.Unmarshal(b, &members); err != nil {
		return nil, err
	}
	maps.Copy(members, p.Extra)
	return json.Marshal(members)
}

// Write answers with the problem and its Status, by default 500.
func (p Problem) Write(w http.ResponseWriter) {
	if p.Status == 0 {
		p.Status = http.StatusInternalServerError
	}
	body, err := json.Marshal(p)
	if err != nil { // Extra cannot be encoded
		p.Extra = nil
		body, _ = json.Marshal(p)
	}
	w.Header().Del("Retry-After") // an earlier value must not stay
	if p.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(p.RetryAfterSeconds, 10))
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // it fails if the client has gone
}

package httplimit

import (
	"encoding/json"
	"net/http"

	"github.com/pgmetered/metered/budget"
)

// QuotaExceeded is the draft's problem type for a denial.
const QuotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// Problem is a refusal as problem details (RFC 9457). All members are optional;
// without Type, Title should be the text of the status.
type Problem struct {
	Type   string `json:"type,omitempty"`
	Title  string `json:"title,omitempty"`
	Status int    `json:"status,omitempty"`
	Detail string `json:"detail,omitempty"`

	// ViolatedPolicies are the names of the policies that refused, for QuotaExceeded.
	ViolatedPolicies []string `json:"violated-policies,omitzero"`
}

// Problem describes a denial, by the names of the policies that refused: shared ones
// too, and none that are not policies.
func (p *Policies) Problem(e *budget.ExceededError) Problem {
	if p == nil {
		p = &Policies{}
	}
	refused := map[string]bool{}
	for _, r := range orNothing(e).Refusals {
		refused[r.Limit.Name] = true
	}
	names := []string{}
	for _, policy := range p.shown {
		if refused[policy.name] {
			names = append(names, policy.name)
		}
	}
	for _, name := range p.shared {
		if refused[name] {
			names = append(names, name)
		}
	}
	return Problem{
		Type:   QuotaExceeded,
		Title:  "Request cannot be satisfied as assigned quota has been exceeded",
		Status: http.StatusTooManyRequests, ViolatedPolicies: names,
	}
}

// Refuse answers a denial: its fields (ShowRefusal) and its Problem, with status 429.
func (p *Policies) Refuse(w http.ResponseWriter, e *budget.ExceededError) {
	p.ShowRefusal(w.Header(), e)
	p.Problem(e).Write(w)
}

// Write answers with the problem and its Status, 500 if it has none. No cache keeps
// it, as RFC 6585 demands of a 429.
func (p Problem) Write(w http.ResponseWriter) {
	if p.Status == 0 {
		p.Status = http.StatusInternalServerError
	}
	body, err := json.Marshal(p)
	if err != nil { // strings and a number: it cannot be
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // it fails if the client has gone
}

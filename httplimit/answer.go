package httplimit

import (
	"errors"
	"net/http"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
)

// statuses are the answers that a stable code decides by itself. What is missing here is 500,
// unless ProblemOf says otherwise.
var statuses = map[string]int{
	"invalid_argument": http.StatusBadRequest,
	"operation_future": http.StatusBadRequest,
	"event_late":       http.StatusBadRequest,
	"batcher_closed":   http.StatusServiceUnavailable,
	"ttl_too_short":    http.StatusBadRequest,
	"ttl_too_long":     http.StatusBadRequest,

	"token_invalid": http.StatusForbidden,

	"budget_exceeded": http.StatusTooManyRequests, // of ErrExceeded alone, which says nothing of the limits

	"leases_unavailable": http.StatusServiceUnavailable,
	"leases_closed":      http.StatusServiceUnavailable,

	"scope_unknown":        http.StatusNotFound,
	"scope_retired":        http.StatusGone,
	"scope_closed":         http.StatusGone,
	"hold_unknown":         http.StatusNotFound,
	"operation_unknown":    http.StatusNotFound,
	"budget_unknown_entry": http.StatusNotFound,
	"job_key_not_found":    http.StatusNotFound,
	"carve_unknown":        http.StatusNotFound,

	"operation_conflict":    http.StatusConflict,
	"operation_retired":     http.StatusConflict,
	"hold_conflict":         http.StatusConflict,
	"hold_retired":          http.StatusConflict,
	"job_conflict":          http.StatusConflict,
	"token_exists":          http.StatusConflict,
	"carve_conflict":        http.StatusConflict,
	"carve_child_used":      http.StatusConflict,
	"claim_taken":           http.StatusConflict,
	"hold_state":            http.StatusConflict,
	"hold_held":             http.StatusConflict,
	"hold_captured":         http.StatusConflict,
	"hold_released":         http.StatusConflict,
	"hold_expired":          http.StatusConflict,
	"hold_returned":         http.StatusConflict,
	"hold_excess":           http.StatusConflict,
	"hold_ceiling":          http.StatusConflict,
	"hold_not_returnable":   http.StatusConflict,
	"budget_refund_exceeds": http.StatusConflict,
	"budget_not_charge":     http.StatusConflict,
	"budget_entry_purged":   http.StatusConflict,
	"position_unknown":      http.StatusConflict,
}

// ProblemOf decides what HTTP says of an error of this library: status, Retry-After and body.
//
//	400  invalid arguments, TTLs, an operation from the future
//	402  want of prepaid credit: a limit of 0 over the lifetime (budget.Prepaid). Never with
//	     Retry-After: more has to be credited
//	403  tokens.ErrInvalid
//	404  a hold, a scope, an operation, an entry or a key that is not there; 410 for a scope that was retired or closed
//	409  another limit over the lifetime (budget.Lifetime), with Retry-After if open holds may make room;
//	     a claim that is taken, with Retry-After if it may fall free; a hold in another state; conflicts
//	429  a limit over a window, and metered.ErrTooManyAttempts; with Retry-After, unless waiting does not help
//	503  what metered.Retryable says may pass, with Retry-After: 1
//	500  all else, an error of a command's function too, without a code
//
// If several limits refuse, 402 comes before 409, and 409 before 429. The body has the
// stable code, and nothing of an error's text: no scope, no amount, nobody's name. Add a
// Detail in your own words, and then call Write.
func ProblemOf(err error) Problem {
	code := fault.Code(err)
	p := Problem{Status: http.StatusInternalServerError}
	var exceeded *budget.ExceededError
	switch {
	case fault.Retryable(err):
		p.Status, p.RetryAfterSeconds = http.StatusServiceUnavailable, 1
	case errors.As(err, &exceeded):
		p = denial(exceeded, errors.Is(err, fault.ErrTooManyAttempts))
	case errors.Is(err, fault.ErrTooManyAttempts):
		p.Status = http.StatusTooManyRequests
	case statuses[code] != 0:
		p.Status = statuses[code]
	}
	if p.Status != http.StatusInternalServerError {
		p.Code = code
	}
	if code == "claim_taken" {
		p.RetryAfterSeconds = wait(err)
	}
	if p.Title == "" {
		p.Title = http.StatusText(p.Status)
	}
	return p
}

// Write answers an error as ProblemOf decides, and returns the status: of 500 and more you
// will want a line in the log.
func Write(w http.ResponseWriter, err error) (status int) {
	p := ProblemOf(err)
	p.Write(w)
	return p.Status
}

// denial decides by the kind of the limits that refused.
func denial(e *budget.ExceededError, attempts bool) Problem {
	var credit, reserved, lifetime bool
	for _, r := range e.Refusals {
		if r.Limit.Window == budget.OfCredit {
			credit = true
			reserved = reserved || r.Held > 0
		}
		lifetime = lifetime || r.Limit.Window <= 0 && r.Limit.Period.IsZero()
	}
	switch {
	case attempts || !lifetime:
		return Problem{
			Type: QuotaExceeded, Title: "Request cannot be satisfied as assigned quota has been exceeded",
			Status: http.StatusTooManyRequests, RetryAfterSeconds: wait(e),
		}
	case credit && reserved:
		return Problem{Status: http.StatusPaymentRequired, Detail: "a part of the credit is reserved"}
	case credit:
		return Problem{Status: http.StatusPaymentRequired}
	}
	return Problem{Status: http.StatusConflict, RetryAfterSeconds: wait(e)}
}

// wait is what an error says of when it may pass, at least 1; 0 if it does not say, or never.
func wait(err error) int64 {
	var waits interface {
		RetryAfterSeconds() (seconds int64, ok bool)
	}
	if !errors.As(err, &waits) {
		return 0
	}
	if seconds, ok := waits.RetryAfterSeconds(); ok {
		return max(seconds, 1)
	}
	return 0
}

// ProblemOf is the function of that name, with the names of the policies that refused:
// shared ones too, and none that are not policies.
func (p *Policies) ProblemOf(err error) Problem {
	problem := ProblemOf(err)
	var exceeded *budget.ExceededError
	if !errors.As(err, &exceeded) || p == nil {
		return problem
	}
	refused := map[string]bool{}
	for _, r := range exceeded.Refusals {
		refused[r.Limit.Name] = true
	}
	for _, policy := range p.shown {
		if refused[policy.name] {
			problem.ViolatedPolicies = append(problem.ViolatedPolicies, policy.name)
		}
	}
	for _, name := range p.shared {
		if refused[name] {
			problem.ViolatedPolicies = append(problem.ViolatedPolicies, name)
		}
	}
	return problem
}

// Write is the function of that name, with the names of the policies that refused, and with
// the fields of a denial (ShowRefusal). After another error the fields stay as they are.
func (p *Policies) Write(w http.ResponseWriter, err error) (status int) {
	var exceeded *budget.ExceededError
	if errors.As(err, &exceeded) {
		p.ShowRefusal(w.Header(), exceeded)
	}
	problem := p.ProblemOf(err)
	problem.Write(w)
	return problem.Status
}

package httpmetered

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
)

// statuses are the statuses of stable codes. Any other code is 500, unless ProblemOf says
// otherwise.
var statuses = map[string]int{
	"invalid_argument": http.StatusBadRequest,
	"operation_future": http.StatusBadRequest,
	"event_late":       http.StatusBadRequest,
	"batcher_closed":   http.StatusServiceUnavailable,

	"token_invalid": http.StatusForbidden,

	"budget_exceeded": http.StatusTooManyRequests, // of ErrExceeded alone, without its limits
	"jobs_full":       http.StatusTooManyRequests,

	"leases_unavailable": http.StatusServiceUnavailable,
	"leases_closed":      http.StatusServiceUnavailable,

	"scope_unknown":        http.StatusNotFound,
	"scope_retired":        http.StatusGone,
	"scope_closed":         http.StatusGone,
	"hold_unknown":         http.StatusNotFound,
	"operation_unknown":    http.StatusNotFound,
	"budget_unknown_entry": http.StatusNotFound,
	"wallet_unknown_lot":   http.StatusNotFound,
	"not_notarized":        http.StatusNotFound,
	"head_invalid":         http.StatusBadRequest,
	"job_key_not_found":    http.StatusNotFound,
	"carve_unknown":        http.StatusNotFound,

	"operation_conflict": http.StatusUnprocessableEntity, // as the draft of Idempotency-Key has it

	"idempotency_key_missing":   http.StatusBadRequest,
	"idempotency_key_invalid":   http.StatusBadRequest,
	"idempotency_key_in_flight": http.StatusConflict,

	"session_running":     http.StatusConflict,
	"session_finished":    http.StatusConflict,
	"session_lost":        http.StatusConflict,
	"session_not_renewed": http.StatusServiceUnavailable,

	"operation_retired":     http.StatusConflict,
	"operation_stale":       http.StatusConflict,
	"hold_conflict":         http.StatusConflict,
	"hold_retired":          http.StatusConflict,
	"job_conflict":          http.StatusConflict,
	"job_not_parked":        http.StatusConflict,
	"token_exists":          http.StatusConflict,
	"alias_taken":           http.StatusConflict,
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
	"wallet_conflict":       http.StatusConflict,
	"wallet_expired":        http.StatusConflict,
}

// statusClientClosedRequest is the status of a call that was cancelled: nobody reads the answer.
const statusClientClosedRequest = 499

// ProblemOf decides the HTTP answer to an error (docs/http.md). A *Problem is itself. An error
// without a code is a 503 if it is metered.Retryable, else a 500.
//
// The body has no scope, amount or name. Add a Detail in your words, and then call Write.
func ProblemOf(err error) Problem {
	code := fault.Code(err)
	p := Problem{Status: http.StatusInternalServerError}
	var exceeded *budget.ExceededError
	var own *Problem
	var lost *metered.IndefiniteError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &own):
		p = *own
		p.Status = cmp.Or(p.Status, http.StatusInternalServerError)
		p.Title = cmp.Or(p.Title, http.StatusText(p.Status))
		return p
	case fault.Retryable(err):
		if errors.As(err, &lost) {
			p.Operation = lost.ID
		}
		p.Status, p.RetryAfterSeconds = http.StatusServiceUnavailable, 1
	case errors.As(err, &exceeded):
		p = refusal(exceeded, errors.Is(err, fault.ErrTooManyAttempts))
	case errors.Is(err, fault.ErrTooManyAttempts):
		p.Status = http.StatusTooManyRequests
	case fault.Misused(err): // 500
	case statuses[code] != 0:
		p.Status = statuses[code]
	case errors.Is(err, context.Canceled):
		p.Status, p.Title = statusClientClosedRequest, "Client Closed Request"
	case errors.As(err, &tooLarge):
		p.Status = http.StatusRequestEntityTooLarge
	}
	if p.Status != http.StatusInternalServerError {
		p.Code = code
	}
	switch code {
	case "claim_taken":
		p.RetryAfterSeconds = wait(err)
	case "session_running":
		p.RetryAfterSeconds, p.Detail = wait(err), "the request is being carried out"
	case "idempotency_key_missing":
		p.Detail = "the request needs an Idempotency-Key"
	case "idempotency_key_invalid":
		p.Detail = "the Idempotency-Key cannot be used"
	case "idempotency_key_in_flight":
		p.RetryAfterSeconds, p.Detail = 1, "a request with the Idempotency-Key is being carried out"
	}
	if p.Title == "" {
		p.Title = http.StatusText(p.Status)
	}
	return p
}

// Write answers an error as ProblemOf decides, and returns the status: log errors of 500 and more.
// Below Idempotent the command then fails with the error. A writer in between needs Unwrap, as for
// http.ResponseController.
func Write(w http.ResponseWriter, err error) (status int) {
	return (*Policies)(nil).Write(w, err)
}

// refusal decides by the kind of the limits that refused.
func refusal(e *budget.ExceededError, attempts bool) Problem {
	var credit, reserved, lifetime bool
	for _, r := range e.Refusals {
		if r.Limit.Prepaid {
			credit = true
			reserved = reserved || r.Held > 0
		}
		lifetime = lifetime || r.Limit.Window <= 0 && r.Limit.Period.IsZero()
	}
	switch {
	case attempts || !lifetime:
		return Problem{
			Type: quotaExceeded, Title: "Request cannot be satisfied as assigned quota has been exceeded",
			Status: http.StatusTooManyRequests, RetryAfterSeconds: wait(e),
		}
	case credit && reserved:
		return Problem{Status: http.StatusPaymentRequired, Detail: "a part of the credit is reserved"}
	case credit:
		return Problem{Status: http.StatusPaymentRequired}
	}
	return Problem{Status: http.StatusConflict, RetryAfterSeconds: wait(e)}
}

// wait is the number of seconds, at least 1, after which an error may pass. It is 0 if that is
// unknown, or never.
func wait(err error) int64 {
	var exceeded *budget.ExceededError
	var taken *holds.TakenError
	var running *metered.RunningError
	after := budget.Never
	switch {
	case errors.As(err, &exceeded):
		after = exceeded.RetryAfter()
	case errors.As(err, &taken) && !taken.Confirmed:
		after = taken.RetryAfter
	case errors.As(err, &running):
		after = running.RetryAfter
	}
	if after == budget.Never {
		return 0
	}
	return max(1, int64((after+time.Second-1)/time.Second))
}

// ProblemOf is the function ProblemOf, with the names of policies that refused, also shared ones.
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

// Write is the function Write, with ProblemOf's names and the fields of ShowRefusal.
func (p *Policies) Write(w http.ResponseWriter, err error) (status int) {
	failing(w, err)
	problem := p.problem(w, err)
	problem.Write(w)
	return problem.Status
}

// problem sets the fields of a refusal, and returns the problem.
func (p *Policies) problem(w http.ResponseWriter, err error) Problem {
	var exceeded *budget.ExceededError
	if p != nil && errors.As(err, &exceeded) {
		p.ShowRefusal(w.Header(), exceeded)
	}
	return p.ProblemOf(err)
}

// Package httplimit tells HTTP clients where they stand with a budget: the
// RateLimit-Policy and RateLimit fields of draft-ietf-httpapi-ratelimit-headers-11,
// Retry-After, and the 429 of a denial as problem details (RFC 9457).
//
//	policies, err := httplimit.New(httplimit.Config{Limits: perClient, Shared: everyone})
//	…
//	receipt, err := ledger.Charge(ctx, tx, charges...)
//	var exceeded *budget.ExceededError
//	if errors.As(err, &exceeded) {
//		policies.Refuse(w, exceeded)
//		return
//	}
//	policies.Show(w.Header(), receipt)
//
// A policy is a budget.Limit by the name that it has there, and what is not among
// the policies is not shown. Nor are the numbers of shared limits, which tell one
// client what the others do: a shared limit is named when it refuses, no more.
// Scopes, notes and the text of errors are never written.
package httplimit

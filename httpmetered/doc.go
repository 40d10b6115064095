// Package httpmetered says in HTTP what this library answers. Write decides status,
// Retry-After and a problem body (RFC 9457) for every error of the library. Policies tell
// clients where they stand with a budget: the RateLimit-Policy and RateLimit fields of
// draft-ietf-httpapi-ratelimit-headers-11.
//
//	policies, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: perClient, Shared: everyone})
//	…
//	out, err := metered.Do(ctx, client, cmd, fn)
//	if err != nil {
//		if status := policies.Write(w, err); status >= 500 {
//			slog.Error("upload failed", "error", err)
//		}
//		return
//	}
//	policies.Show(w.Header(), out.Receipt)
//
// A policy is a budget.Limit by the name that it has there, and what is not among
// the policies is not shown. Nor are the numbers of shared limits, which tell one
// client what the others do: a shared limit is named when it refuses, no more.
// Scopes, notes and the text of errors are never written.
package httpmetered

// Package httpmetered is this library over HTTP, for net/http alone, in three pieces.
//
// Write answers an error: status, Retry-After and a problem body (RFC 9457), for every error of the library.
//
//	out, err := metered.Do(ctx, client, cmd, fn)
//	if err != nil {
//		if status := httpmetered.Write(w, err); status >= 500 {
//			slog.Error("upload failed", "error", err)
//		}
//		return
//	}
//
// Idempotent is the Idempotency-Key of draft-ietf-httpapi-idempotency-key-header-07 as a middleware: the handler runs in a command, and a
// repetition gets its first answer again. Key is for handlers that run a command of their own.
//
// Limit and LimitLeased are middlewares that charge each request, and refuse those that exceed a limit. Policies show clients the standing
// of a budget: RateLimit-Policy and RateLimit of draft-ietf-httpapi-ratelimit-headers-11. A policy is a budget.Limit by its name. The
// numbers of shared limits are never shown, since they are other clients' traffic.
//
// Scopes, notes and the text of errors are never written.
package httpmetered

// Package httpmetered is this library over HTTP, for net/http (docs/http.md). Write answers errors,
// as problem details (RFC 9457). Idempotent carries out requests with an Idempotency-Key once
// (draft-ietf-httpapi-idempotency-key-header-07). Limit and LimitLeased charge each request.
// Policies show clients their budget (draft-ietf-httpapi-ratelimit-headers-11).
//
// Scopes, notes and texts of errors are never written.
package httpmetered

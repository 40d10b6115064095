// Package httpmetered is this library over HTTP, for net/http alone (docs/http.md). Write answers errors, as problem
// details (RFC 9457). Idempotent carries out requests with an Idempotency-Key once
// (draft-ietf-httpapi-idempotency-key-header-07). Limit and LimitLeased charge each request. Policies show clients
// the standing of a budget (draft-ietf-httpapi-ratelimit-headers-11).
//
// Scopes, notes and the text of errors are never written.
package httpmetered

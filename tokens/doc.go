// Package tokens keeps one-time grants in Postgres: secrets that are minted for a purpose and a subject, and consumed
// at most once, inside the transaction that acts on their grant.
//
// The database keeps the SHA-256 of a token's text:
//
//	acme_upload_9mzR0q…7dQ2uVfZ3k
//	└ prefix ──┘└ 43 ─────┘└ 6 ─┘  32 secret bytes and a CRC-32 (IEEE), in base 62
//
// Consumers of one token queue on its row, and exactly one commits the last use. At READ COMMITTED the others get
// ErrInvalid, at higher levels ErrSerialization, then ErrInvalid. A token is good while clock < ExpiresAt, by the
// database's clock when Consume begins. Mail scanners follow links: call Inspect on GET, and Consume on POST.
//
// Every call may fail with ErrArgument, and with errors of Postgres. Writes also fail with ErrBusy and
// ErrSerialization. Rolling back undoes them. Locks are kept until the transaction ends.
package tokens

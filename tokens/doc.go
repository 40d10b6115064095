// Package tokens keeps one-time grants in Postgres: secrets minted for a purpose and a subject, and
// consumed once, in the transaction that acts on the grant.
//
// The database keeps the SHA-256 of a token's text:
//
//	acme_upload_9mzR0q…7dQ2uVfZ3k
//	└ prefix ──┘└ 43 ─────┘└ 6 ─┘  32 secret bytes and a CRC-32 (IEEE), in base 62
//
// Consumers of a token queue on its row, and one commits the last use. At READ COMMITTED the others
// get ErrInvalid, at higher levels budget.ErrSerialization first. A token is good while clock < ExpiresAt,
// by the database's clock when Consume begins. Mail scanners follow links: call Inspect on GET, and
// Consume on POST.
//
// The result of a command, and an answer below httpmetered.Idempotent, is stored in clear: keep the
// text of a token out of it. Mint with a derived Secret (metered.Tx.Secret), and derive it again
// for the answer and for each replay (metered.Client.Secret, httpmetered.IdempotentConfig.Reveal).
//
// Every call may fail with budget.ErrArgument, and writes with budget.ErrBusy, ErrSerialization,
// ErrNotMigrated and ErrNotGranted, which abort the transaction. Rolling back
// undoes a write. Locks are kept until the transaction ends. Reads take none.
package tokens

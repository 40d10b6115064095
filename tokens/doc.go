// Package tokens keeps one-time grants in Postgres: secrets that are minted for
// a purpose and a subject, handed out once, and consumed at most once, inside
// the transaction that does what they grant.
//
//	store, err := tokens.New(tokens.Config{Prefix: "acme_upload"})
//	…
//	minted, err := store.Mint(ctx, tx, tokens.Mint{Purpose: "upload", Subject: user, Payload: asset, TTL: time.Hour})
//	send(minted.Token.Reveal())
//	…
//	grant, err := store.Consume(ctx, tx, "upload", user, presented)
//	if errors.Is(err, tokens.ErrInvalid) { … 403 … }
//
// # What is kept
//
// Only the SHA-256 of the token's text, with its purpose, subject, payload and
// times. The text itself exists where Mint returned it and where you sent it.
// Purposes and subjects are yours: the package compares them, byte by byte, and
// knows nothing else about them.
//
// # The text
//
//	acme_upload_9mzR0q…7dQ2uVfZ3k
//	└ prefix ──┘└ 43 ─────┘└ 6 ─┘
//
// The prefix, an underscore, 32 secret bytes as 43 digits of base 62 (0-9, a-z,
// A-Z), and the CRC-32 (IEEE) of all that comes before it as 6 digits more. For
// one prefix the length is constant. The prefix lets secret scanners find a token that
// leaked; the checksum refuses every mistyped character, and whatever is not a
// token of this prefix, without a query.
//
// A [Token] prints redacted wherever a program might print it by mistake; its
// Reveal method is the one way to the text. Search your code for it.
//
// # Consuming
//
// Consume is one UPDATE of one row by its primary key, in one round trip, and
// belongs in the transaction of the work that it grants: if that rolls back, the
// token stays unspent. Of any number of consumers of a token with one use,
// exactly one commits. They queue on the token's row:
//
//   - at READ COMMITTED the others get ErrInvalid once the winner has committed,
//     or take the use if it rolled back;
//   - at REPEATABLE READ and SERIALIZABLE they get SQLSTATE 40001, and ErrInvalid
//     when they try again. A snapshot from before a token was minted does not
//     contain it: there it is unknown, as if this transaction had come first.
//
// Whatever is wrong with a token, the outward answer is the same [ErrInvalid],
// with the same text; [InvalidError.Reason] tells your own logs more. Presenting
// a token for the wrong purpose or subject does not use it up.
//
// Mail scanners and chat programs follow the links they see. Show a page on GET,
// with Inspect, which changes nothing; consume on POST.
//
// # Time
//
// Times are the database's clock, not the client's, and are kept in
// microseconds. A token is good while clock < ExpiresAt and expired at equality.
// What counts is the clock as Consume begins in the database; waiting for a
// competing consumer does not expire a token that was presented in time.
//
// # Roles
//
// All writes are functions of the schema, so an application's role needs EXECUTE
// on those and no INSERT, UPDATE or DELETE (metered.GrantSQL). Purge is for the
// schema's owner, or a role of its own (metered.GrantMaintenanceSQL).
package tokens

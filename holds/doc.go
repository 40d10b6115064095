// Package holds reserves amounts in a budget's ledger until a deadline. A hold keeps units of one or several scopes for
// a holder, and ends in exactly one of three ways:
//
//	place ─▶ held ─ Capture ─▶ captured   charges what was used, frees the rest
//	          ├─── Release ──▶ released
//	          ├─── deadline ─▶ expired
//	          └─── Extend ───▶ held, with a later deadline
//
// Refund gives back what was captured, and makes a captured hold Returned. An ended hold is never held again. Until
// Hold.Due its amounts count against every limit of its scopes. Afterwards they count no more, whether a sweeper ran or
// not: Sweep and Expire clean up, and announce what ended by time.
//
//	ledger, err := budget.New(budget.Config{})
//	book, err := holds.New(ledger, holds.Config{})
//
// With a lifetime limit (budget.Lifetime), what is captured stays spent: seats, stock. With a window the limit is a
// rate. A Claim is a hold of capacity 1 on a key: a unique name, one seat, one machine.
//
// Writes take the caller's transaction: rolling it back takes them back. A second call writes again, or finds the hold
// ended (*StateError): only Place with an ID, Claim and Expire can be repeated, and any call in a command (metered.Tx).
// Place, Claim, Capture, Release, Extend and Refund act on all that they name, or do nothing.
//
// Writes lock scopes, in the order of their keys, and then rows of holds, in the order of placement, until the
// transaction ends. Call them last in it. Make one call of several Lines, or use a command: two calls in one
// transaction can deadlock (SQLSTATE 40P01) with two in another. Reads take no lock, and run on a replica too, whose
// clock then says what has expired.
//
// Every call may fail with an *ArgumentError, before any SQL if it does not say otherwise. Every write may fail with
// ErrBusy, budget.ErrClock, budget.ErrWindowPurged, budget.ErrOverflow, SQLSTATE 40001 or 40P01: these abort the
// transaction. The errors that a method names are its own, and leave it usable. See docs/model.md and
// docs/operations.md.
package holds

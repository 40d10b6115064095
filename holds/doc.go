// Package holds reserves units of one or several scopes until a deadline. A hold ends once:
//
//	place ─▶ held ─ Capture ─▶ captured   charges the units used, frees the rest
//	          ├─── Release ──▶ released
//	          ├─── deadline ─▶ expired
//	          └─── Extend ───▶ held, with a later deadline
//
// Return gives captured units back. Held units count against every limit of their scopes until
// Hold.Due, swept or not.
//
// A rollback undoes a write. A call acts on all holds that it names, 1 to 100 IDs of one Tenant, or
// on none. A Holder, if set, must be that of each hold. A Note is recorded in the history and the
// ledger. Ids, tenants, holders and entities have up to 255 bytes. Place with an ID, Claim and
// Expire can be repeated, and so can any call in a command (metered.Tx).
//
// Writes lock scopes, and then holds, until the transaction ends: call them last. Two calls in one
// transaction can deadlock with two in another (docs/operations.md). Reads take no lock, and run on
// a replica, whose clock then decides which holds have expired.
//
// Every call may fail with a *budget.ArgumentError, before any SQL unless it says otherwise. Every
// write may fail with budget.ErrBusy, budget.ErrClock, budget.ErrWindowPurged
// or budget.ErrSerialization, which abort the transaction. Errors that a method names leave it
// usable.
package holds

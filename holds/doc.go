// Package holds reserves amounts in a budget's ledger until a deadline. A hold keeps units of one or several scopes
// for a holder, and ends in exactly one of three ways:
//
//	place ─▶ held ─ Capture ─▶ captured   charges the units used, frees the rest
//	          ├─── Release ──▶ released
//	          ├─── deadline ─▶ expired
//	          └─── Extend ───▶ held, with a later deadline
//
// Return gives captured units back, and makes a captured hold Returned. An ended hold is never held again. Its
// amounts count against every limit of its scopes until Hold.Due and no longer, whether a sweeper ran or not. Sweep
// and Expire clean up, and announce holds that ended by time.
//
//	ledger, err := budget.New(budget.Config{})
//	book, err := holds.New(ledger, holds.Config{})
//
// With a lifetime limit (budget.Lifetime), captured units stay spent: seats, stock. With a window the limit is a
// rate. A Claim is a hold of capacity 1 on a key: a unique name, one seat, one machine.
//
// Writes take the caller's transaction: a rollback undoes them. A call acts on all that it names, 1 to 100 IDs of one
// Tenant, or does nothing. A Holder, if set, must be that of each hold, and a Note is recorded in the history and with the
// ledger's entries. Ids, tenants, holders and entities have at most 255 bytes. A second call writes again, or finds the
// hold ended (*StateError). Only Place with an ID, Claim and Expire can be repeated, and any call in a command
// (metered.Tx). Optional fields default to their zero value: none.
//
// Writes lock scopes, in the order of their keys, and then holds, in the order of placement, until the transaction ends:
// call them last in it. Two calls in one transaction can deadlock (SQLSTATE 40P01) with two in another: make one call of
// several Lines, or use a command. Reads take no lock. They also run on a replica, whose clock then decides which holds
// have expired.
//
// Every call may fail with a *budget.ArgumentError, before any SQL unless the call says otherwise. Every write may fail
// with budget.ErrBusy, budget.ErrClock, budget.ErrWindowPurged, budget.ErrOverflow, SQLSTATE 40001 or 40P01, which abort
// the transaction. The errors that a method names leave it usable. See docs/model.md and docs/operations.md.
package holds

// Package wallet keeps prepaid credit in lots, each with an end, a priority and a category.
//
// A wallet is a scope of the ledger. A grant is a credit that adds a lot, and a draw is a charge
// with Book.Limit: Book.Charge makes one for every call that takes charges, Book.Line makes one for
// holds and sessions, and budget.Ledger.Refund gives back. Lots are drawn by priority (lower
// first), end and age. A lot's units lapse at its end (breakage), by the database's clock, swept or
// not. Units that no lot covers are overdraft, up to Config.Overdraft, and the next credit pays
// them back (docs/credit.md).
//
// Writes lock the wallet until the transaction ends: make them last. Reads take no lock. Rolling
// back undoes a write. Every call may fail with a *budget.ArgumentError, and writes with the errors
// of budget.Ledger.Charge.
package wallet

// Package wallet keeps prepaid credit in lots, each with its own end, priority and category.
//
// A wallet is a scope of the ledger with a grant. A grant is a credit, and a draw is a charge with Book.Limit: holds,
// leases, commands and httpmetered spend lots with the Charge and the Line of a Book. budget.Ledger.Refund gives back
// draws. Lots are drawn by priority (lower first), end and age. A lot's units lapse at its end (breakage), by the
// database's clock. A draw or Sweep writes that down, perhaps later. Units that no lot covers are overdraft, up to
// Config.Overdraft, and the next credit pays them back. More: docs/credit.md.
//
// Writes lock the wallet until the transaction ends, so they come last in it, and reads take no lock. Rolling back
// undoes a write. Every call may fail with a *budget.ArgumentError, and writes with the errors of
// budget.Ledger.Charge.
package wallet

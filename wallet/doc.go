// Package wallet keeps prepaid credit in lots, each with its own end, priority and category.
//
//	ledger, err := budget.New(budget.Config{})
//	book, err := wallet.New(ledger, wallet.Config{})
//	book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 1000, For: 30 * 24 * time.Hour, Reference: "invoice-17"})
//	book.Draw(ctx, tx, wallet.Draw{Wallet: "ann", Amount: 20})
//
// A wallet is a scope of the ledger, and becomes a wallet with its first grant. A grant is a credit, and a draw is a charge with the limit
// Book.Limit. So holds, leases, commands and httpmetered spend lots as well, with the Charge and the Line of a Book.
//
// Lots are drawn by priority (lower first), then by the earliest end, then by age. A lot ends at Lot.Expires, by the database's clock.
// The units that it has left lapse then (breakage). A draw or Sweep writes that down later, with the same result.
//
// Units of a hold or a lease stay with it after their lot's end: freed then, they lapse at once. A refund goes back to the lots that were
// drawn, the last one first, and Grant.LateRefunds decides for a lot that has ended. Units that no lot covers are overdraft, up to
// Config.Overdraft. The next credit pays it back.
//
// Writes lock the wallet until the transaction ends, so they come last in it. Reads take no lock. Rolling back undoes a write. Every call may fail with a
// *budget.ArgumentError (budget.ErrArgument), before any SQL unless the call says otherwise, and a write with the errors of budget.Ledger.Charge.
package wallet

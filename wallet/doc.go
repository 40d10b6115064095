// Package wallet keeps prepaid credit in lots: each has its own end, priority and category.
//
//	ledger, err := budget.New(budget.Config{})
//	book, err := wallet.New(ledger, wallet.Config{})
//	book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 1000, For: 30 * 24 * time.Hour, Reference: "invoice-17"})
//	book.Draw(ctx, tx, wallet.Draw{Wallet: "ann", Amount: 20})
//
// A wallet is a scope of the ledger whose credit is in lots: it becomes one with its first grant. Grant is a credit, a draw is a
// charge with the limit Book.Limit. So whatever charges or holds a scope (budget, holds, leases, a metered.Command, httpmetered) spends
// a wallet's lots: give it those of Charge and Line. Amounts are int64 units of yours, such as cents.
//
// Lots are drawn by priority (lower first), then the earliest end, then the oldest. A lot has ended at Lot.Expires, by the
// database's clock, whether anybody noticed or not. The units left lapse, as an entry of the ledger (breakage). Expire, the sweeper, writes
// it and calls subscribers, and a draw before it writes it, too. Holds and lots end in the order of their times, in any writer.
//
// The units of a hold or a lease are still its own after their lot's end. Those that it gives back then lapse at once.
// A refund goes to the lots that the charge was drawn of, the last one first. Grant.LateRefunds decides for a lot that has ended.
// Units that no lot covers are overdraft, up to Config.Overdraft. The next credit pays it back.
//
// Writes lock the wallet until the transaction ends, as a charge does: call them last in it. Reads take no lock. Every call may fail with an
// *ArgumentError, before any SQL if it does not say otherwise, and writes with the errors of budget.Ledger.Charge that abort the
// transaction.
package wallet

// Package holds reserves amounts in a budget's ledger until a deadline.
//
// A hold keeps units of one or several scopes for a holder. It is placed, and ends in
// exactly one of three ways: captured, which turns it into spending; released; or
// expired, when its time is over.
//
//	place ─▶ held ─ Capture ─▶ captured   charges what was used, frees the rest
//	          ├─── Release ──▶ released
//	          ├─── deadline ─▶ expired
//	          └─── Extend ───▶ held, with a later deadline
//
// While it is held its amounts count against every limit of its scopes, beside what was
// spent. From the instant of its deadline (after its grace, if it has one) they count no
// more, whether anything has noticed or not: every charge, placement and reading leaves out
// what is due. Sweep and Expire are cleanup, and announce what ended by time. A hold may be
// ended late, never early, and an ended one never comes back.
//
// A lifetime limit of a scope (budget.Lifetime) is its capacity and what is captured stays
// spent: seats, stock. With a window it is a rate. Claim is a hold of capacity 1 on a
// (type, value): a unique name, one seat, one machine.
//
// All calls that write take the caller's pgx.Tx. What a hold keeps is in the ledger,
// in entries of the scopes' chains, so budget.Ledger.Verify covers it; who holds it and
// what became of it is in tables of its own, with a history of every transition.
//
// Two calls of Place or Claim in one transaction can deadlock with two in another that
// take their scopes the other way round, as two charges can: each keeps its locks until
// COMMIT. Postgres then ends one of the transactions, after a second (deadlock_timeout,
// SQLSTATE 40P01), and it has to run again. There are two ways out, both of which take all
// locks in one order: one call with several Lines; or a command (metered.Tx.Place,
// metered.Tx.Claim), which makes all its calls last, and is retried besides.
// (budget.Ledger.Lock before the first call is a third way, as long as none of the scopes'
// holds is due, and no id is chosen by the caller.)
//
// To begin: metered.Migrate makes the tables, and New takes the ledger in which the units
// are held.
//
//	ledger, err := budget.New(budget.Config{})
//	book, err := holds.New(ledger, holds.Config{})
//
// Go has no way to make a value usable only once, so a hold that was captured can be
// passed to Capture again. It is then refused by the database with a *StateError that
// says in which state it is; a flag in the value would lie after a rollback.
package holds

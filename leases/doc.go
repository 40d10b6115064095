// Package leases makes a budget faster than its lock: it leases a slice of a scope under the lock
// once, and spends from it without the lock (docs/scale.md).
//
// Two ways to spend:
//
//   - Pool.Charge is budget.Ledger.Charge, where a spend is a row in your transaction: a rollback takes it back. metered.Config.Leases does
//     so for commands.
//   - Pool.Allow decides from memory, without a transaction. Units that a killed process had not reported count as spent: a limit can then
//     admit too little, and never too much.
//
// A lease counts as held in full while it is open, at most until the first period of its limits
// ends. Settling it captures its spends and frees the rest. Its owner settles it when it is used up
// or idle, and in Close. After its end any Pool or Sweep does. Settling waits for open transactions
// that spent from it, up to a second or a shorter LockTimeout.
//
// The ledger serves charges that a lease cannot: with Limit.MaxFrom, larger than a slice, of seldom
// charged scopes, and near the end of a budget. A charge that lacks units recalls leased ones from
// all processes. Above READ COMMITTED a spend also locks the lease's row.
package leases

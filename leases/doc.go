// Package leases makes a budget faster than its own lock: it takes a slice of a scope under the lock once, and spends
// from it without the lock.
//
//	pool, err := leases.New(db, leases.Config{Rules: []leases.Rule{{Prefix: "org/"}}})
//	defer pool.Close(ctx)
//	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
//		_, err := pool.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5, Limits: limits})
//		return err
//	})
//
// There are two ways to spend:
//
//   - Pool.Charge has the signature and the errors of budget.Ledger.Charge. A spend is a row in your transaction: a rollback
//     takes it back, and a process that is killed loses nothing. metered.Config.Leases does the same for commands.
//   - Pool.Allow decides from memory, in nanoseconds, without a transaction. What a killed process had not told of counts
//     as spent in full: it can let too little in after a crash, and never too much.
//
// A lease counts as held in full while it is open. When it is settled, what was spent is captured, and the rest is
// free. So no limit is ever exceeded, in any sliding window or period. A lease ends with the first period of its limits. Its owner settles a lease when it is used up or idle, and in
// Close; anybody may once it has ended: another process's Pool, or Settle. Whoever settles waits for transactions that
// spent from it, up to a second or the ledger's lock timeout, whichever is shorter, and comes again if they go on.
//
// Near the end of a budget slices would keep units from others. So a slice is at most a part of what is available
// (Rule.Share), charges of what is left go to the ledger directly, and a charge that is refused for want of leased units
// recalls them from all processes.
//
// What a lease cannot do, the ledger does: charges with Limit.MaxFrom, of amounts larger than a slice, of scopes that are
// charged seldom. All isolation levels are correct; at REPEATABLE READ and SERIALIZABLE a spend also locks the lease's row.
package leases

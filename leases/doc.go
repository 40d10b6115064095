// Package leases makes a budget faster than its own lock: it takes a slice of a scope under the lock once, and spends
// from it without the lock.
//
//	pool, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "org/"}}})
//	defer pool.Close(ctx)
//	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
//		_, err := pool.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5, Limits: limits})
//		return err
//	})
//
// There are two ways to spend:
//
//   - Pool.Charge has the signature and the errors of budget.Ledger.Charge. A spend is a row in your transaction: a
//     rollback takes it back, and a killed process loses nothing. metered.Config.Leases does the same for commands.
//   - Pool.Allow decides from memory, in nanoseconds, without a transaction. Units that a killed process had
//     leased and not reported count as spent: after a crash a limit can admit too little, and never too much.
//
// A lease counts as held in full while it is open. Settling it captures its spends and frees the rest. So no limit is
// ever exceeded, in any sliding window or period. A lease ends with the first period of its limits. Its owner settles
// it when it is used up or idle, and in Close. Once it has ended, anybody may: another process's Pool, or Sweep.
// Settling waits for transactions that spent from the lease, up to a second or the ledger's lock timeout, whichever
// is shorter, and is repeated if they go on.
//
// Near the end of a budget slices would keep units from others. So a slice is at most a part of the available units
// (Rule.Share), and charges that no slice serves go to the ledger directly. A charge that is refused for want of
// leased units recalls them from all processes.
//
// The ledger serves charges that a lease cannot: with Limit.MaxFrom, larger than a slice, or of scopes that are
// seldom charged. All isolation levels are correct. At REPEATABLE READ and SERIALIZABLE a spend also locks the
// lease's row.
package leases

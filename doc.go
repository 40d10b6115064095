// Package metered runs metered commands on Postgres: a command charges budgets,
// spends a one-time grant, does the caller's own writes and enqueues durable work,
// and all of it commits or none of it does.
//
//	out, err := metered.Do(ctx, client, metered.Command{
//	    ID:        requestID,                     // the same id never runs twice
//	    Namespace: user,                          // whose id it is: who is signed in
//	    Name:      "upload",
//	    Input:     input,
//	    Token:     &metered.Redeem{Purpose: "upload", Subject: user, Presented: token},
//	    Charges:   []budget.Charge{{Scope: "org/acme", Amount: size, Limits: limits}},
//	}, func(ctx context.Context, tx *metered.Tx) (Stored, error) {
//	    … your writes through tx, tx.Grant, tx.Enqueue(ctx, ProcessUpload{…}, nil) …
//	    return stored, nil
//	})
//
// Do owns its transaction; DoTx runs the same command inside one of yours. The
// pieces can be used alone, each in a transaction of yours: packages budget, holds,
// tokens and jobs.
//
// # The order of things
//
// A scope's lock is held until COMMIT, so charges come last:
//
//	flush 1      BEGIN, claim the id, spend the token, a first look at the budget
//	function     your writes and jobs
//	last flush   credits (Tx.Credit), holds (Tx.Place, …), charges, operation record, COMMIT
//
// The first look takes no lock and refuses hopeless commands before they work; a charge
// that the function itself makes room for belongs in Tx.Charge, which is not looked at.
// The charge in the last flush is the one that counts: it can refuse after the
// function has run, and then everything is rolled back. So the function must have
// no effect outside the transaction, and may run more than once.
//
// # Outcomes
//
// Do returns nil: committed. An error that is not an *IndefiniteError: not
// committed, nothing was written (but sticky charges). *IndefiniteError: nobody
// can tell, because the connection was lost while COMMIT was under way and the
// deadline passed before the answer could be looked up. Call Do again with the
// same command: it answers with the first result if there is one. Retryable tells which
// errors are worth another call, Code what they are.
//
// # Where to find what
//
//   - An idempotent endpoint: Do. Inside a transaction of yours: DoTx.
//   - What became of an id: Client.Lookup.
//   - A limit on attempts that also counts those that fail: Command.Sticky.
//   - A top-up, a transfer, a refund: Tx.Credit, Tx.RefundCharge.
//   - A seat, stock, a unique name, held until a deadline: Tx.Place and Tx.Claim, or package
//     holds in a transaction of yours; package holdjobs, to hear of its end.
//   - A job whose cost is known when it is done: package holdjobs.
//   - An audit record, or a counter, of what was refused: Config.OnDenial.
//   - What HTTP says of an error, and RateLimit fields: package httplimit.
//   - Reads of a replica after a write: Command.LSN, and package replica.
//   - Set-up: Migrate or SchemaSQL, GrantSQL; what deletes: Client.PurgeOperations and the
//     Purge of each package.
package metered

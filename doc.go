// Package metered runs metered commands on Postgres: a command charges budgets,
// spends a one-time grant, does the caller's own writes and enqueues durable work,
// and all of it commits or none of it does.
//
//	out, err := metered.Do(ctx, client, metered.Command{
//	    ID:      requestID,                       // the same id never runs twice
//	    Name:    "upload",
//	    Input:   input,
//	    Token:   &metered.Redeem{Purpose: "upload", Subject: user, Presented: token},
//	    Charges: []budget.Charge{{Scope: "org/acme", Amount: size, Limits: limits}},
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
// same command: it answers with the first result if there is one.
package metered

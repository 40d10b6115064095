// Package maintain runs everything that has to run regularly, in one call: from a job, a ticker or cron.
//
//	report, err := maintain.Run(ctx, pool, maintain.Parts{Ledger: client.Budget, Holds: client.Holds}, maintain.Policy{
//		Entries: 400 * 24 * time.Hour, Operations: 30 * 24 * time.Hour,
//	})
//
// A sweep ends and announces holds, leases and lots whose time is over. A purge deletes old rows. No balance, limit or
// refusal depends on when either runs. Package maintainjobs runs it as periodic River jobs, and the command
// metered maintain from a shell. Callers that need one sweep or one purge alone call holds.Book.Sweep and its like.
package maintain

// Package budget is a ledger of integer units – money, quota, stock – in Postgres, with limits over exact sliding
// windows, calendar periods and lifetimes. Most programs want Ledger.Charge, or package metered, which calls it as part of a whole command.
//
//	ledger, err := budget.New(budget.Config{})
//	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//		// … your own writes …
//		_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5,
//			Limits: []budget.Limit{budget.PerWindow(1000, time.Hour)}})
//		return err
//	})
//
// Many charges that do not depend on each other go in one call of Ledger.ChargeEach. Usage events that may be delivered twice
// are counted once by Ledger.Ingest. A Batcher commits the charges of many goroutines together.
//
// Ledger.Usage reads the use of a scope now, UsageBetween and Series its use in a range of time: the invoice of a month by
// day. Entries lists its entries, and SearchEntries finds some of them.
//
// A scope is a name of yours. It needs no creation, so a mistyped name is another scope: Scopes and MustExist guard
// against that. A scope's ledger is a chain of entries that never change. Limits come with each call and are stored
// nowhere. A charge is admitted if, for each limit,
//
//			used inside the window or period + held + amount <= limit
//
//	  - A charge counts while it is younger than the window, by the database's clock. A refund counts at its charge's time.
//	  - In a period (PerDay, PerMonth, PerPeriod and the like) it counts from the period's first moment until before its end.
//	  - A credit counts for lifetime limits only. Held units count everywhere until they are captured or freed.
//
// A limit can have thresholds (Limit.Tell): "80 % used", "credit below 500". The charge that reaches one calls
// Config.OnThreshold in its own transaction, once in each period, or until use has gone back (Threshold).
//
// Rolling the transaction back takes its writes back. Calls but Ingest are not idempotent: a second one writes again (a
// command, metered.Do, remembers). A write holds an advisory lock on each of its scopes until the transaction ends, so charge
// last. One call takes its locks in the order of their keys. Two calls in one transaction can deadlock (SQLSTATE 40P01)
// with two in another: use one call, Ledger.Lock, or a command. All isolation levels are correct. READ COMMITTED is the
// fastest (docs/operations.md).
//
// Every call may fail with an *ArgumentError, before any SQL. Every write may fail with ErrBusy, ErrOverflow, SQLSTATE
// 40001 or 40P01, and a charge with ErrClock or ErrWindowPurged too: these abort the transaction. A refusal,
// *ExceededError or *ScopeError, leaves it usable.
package budget

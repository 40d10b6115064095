// Package budget is a ledger of integer units – money, quota, stock – in Postgres, with limits over exact sliding windows, calendar periods
// and lifetimes. Most programs want Ledger.Charge, or package metered, which calls it in a command.
//
//	ledger, err := budget.New(budget.Config{})
//	…
//	receipt, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5,
//		Limits: []budget.Limit{budget.PerWindow(1000, time.Hour)}})
//
// A scope is a name of yours, and needs no creation. A mistyped name is another scope: Scopes and MustExist guard against that. Limits come
// with each call. A charge is admitted if, for each limit,
//
//	units used inside the window or period + held units + amount <= limit
//
// A charge counts by the database's clock, while it is younger than the window, or in its period. A refund counts at the time of its
// charge, a credit for lifetimes only, and held units until they are captured or freed (docs/model.md).
//
// Rolling back undoes a write. Calls but Ingest are not idempotent: metered.Do is. A write locks its scopes until the transaction ends, in
// the order of their keys, so charge last. Two calls in a transaction can deadlock (SQLSTATE 40P01) with another's: use one call,
// Ledger.Lock, or a command. All isolation levels are correct, and READ COMMITTED is the fastest.
//
// Every call may fail with an *ArgumentError, before any SQL. Every write may fail with ErrBusy, ErrOverflow or ErrSerialization, and a
// charge with ErrClock or ErrWindowPurged too. Reads take no lock, and run on replicas too. Iterators read pages, with no statement open in
// between, and yield an error last. JSON has durations in microseconds, under names that end in _us.
package budget

// Package budget is a ledger of integer units – money, quota, stock – in Postgres, with limits over
// exact sliding windows, calendar periods and lifetimes. Most programs want Ledger.Charge, or
// package metered, which calls it in a command.
//
//	ledger, err := budget.New(budget.Config{})
//	…
//	receipt, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5,
//		Limits: []budget.Limit{budget.PerWindow(1000, time.Hour)}})
//
// A scope is a name of yours. It needs no creation, so a mistyped name is another scope: Scopes and
// MustExist guard against that. A charge is admitted if, for each limit,
//
//	units used inside the window or period + held units + amount <= limit
//
// A charge counts while it is younger than the window, or in its period, by the database's clock
// (docs/model.md).
//
// Rolling back undoes a write. Only Ingest is idempotent: for other calls use metered.Do. A write
// locks its scopes until the transaction ends, in the order of their keys, so charge last. Two
// calls in one transaction can deadlock with two in another (SQLSTATE 40P01): use one call,
// Ledger.Lock, or a command. All isolation levels are correct, and READ COMMITTED is the fastest.
//
// Every call may fail with an *ArgumentError, before any SQL. Every write may fail with ErrBusy,
// ErrSerialization, and a charge also with ErrClock or ErrWindowPurged. Reads take
// no lock, and run on replicas. Iterators read pages, and yield an error last. JSON has durations
// in microseconds, under names that end in _us.
package budget

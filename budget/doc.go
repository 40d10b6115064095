// Package budget is a ledger of integer units – money, quota, stock – in
// Postgres, with limits over exact sliding windows.
//
// # Model
//
// A scope is an opaque name ("org/acme"). Its ledger is a chain of entries that
// are never changed: charges, credits and refunds, each carrying the scope's
// running sums after it. A charge names the limits that it must stay within: so
// many units per window, or for the scope's lifetime. It is admitted, for every
// limit named, only if
//
//	used inside the window + held + amount <= limit
//
// Limits are given with each call and stored nowhere: a plan's change applies
// with the next charge. A limit below what is used already refuses and changes
// nothing.
//
//   - A charge counts in a window while it is younger than the window, to the
//     microsecond, by the database's clock.
//   - A refund counts at the time of the charge it refunds, so that a charge and
//     its refund leave a window together.
//   - A credit (a top-up, prepaid money) counts for lifetime limits only. Prepaid
//     credit is a lifetime limit of 0 (Prepaid): nothing can be spent that was not credited.
//   - For a quota of a calendar month (or day, …) make the month a part of the scope, with a
//     lifetime limit (see ScopeKey): windows slide, and do not begin anew on the 1st.
//   - Held units (reservations) count everywhere until they are captured or freed.
//
// Scopes need no creation, so a mistyped scope is a fresh and empty budget: build
// scopes with ScopeKey rather than by hand. Overlapping ranges (room 7 from 10:00
// to 12:00) are not understood; cut them into slots and charge each.
//
// # Beginning
//
//	_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{}) // once; or metered.SchemaSQL in your own migrations
//	ledger, err := budget.New(budget.Config{})
//	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//		// … your own writes …
//		_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5,
//			Limits: []budget.Limit{budget.PerWindow(1000, time.Hour)}})
//		return err
//	})
//
// Migrate is in package metered, which links River. A program that must not link River
// leaves the migration to another program.
//
// # Transactions
//
// Ledger.Charge runs in the caller's transaction and takes effect with its
// commit. It holds an advisory lock on each scope until then, so charge late,
// as the last thing before COMMIT; package metered does that by itself, in the
// same network flush. Two charges in one transaction, or a charge and a credit, can
// deadlock with two in another if they take their scopes in different orders
// (Postgres then ends one of them, SQLSTATE 40P01). There are three ways out: charge both
// scopes in one call; take all locks at once, with Ledger.Lock, before the first of several
// calls; or use a command of package metered, which takes all its locks in one order.
//
// All isolation levels are correct. At READ COMMITTED writers of one scope queue
// and each sees the one before. At REPEATABLE READ and SERIALIZABLE a writer that
// waited has a snapshot older than the lock, and fails with SQLSTATE 40001: on a
// hot scope most attempts become retries (measured: 142 charges a second instead
// of 2,937). At SERIALIZABLE some writers of other scopes fail with it as well (measured:
// 3 in 100). Prefer READ COMMITTED, and cap the retries.
//
// # Errors
//
// A denial is an error, *ExceededError, and not a field that can be overlooked:
// errors.Is(err, ErrExceeded). It leaves the transaction usable. Every other error
// of a write has aborted the transaction, as errors in Postgres do, unless its
// comment says otherwise.
package budget

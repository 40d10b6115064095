package budget

import (
	"cmp"
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
)

const lockSQL = `select metered.lock_scopes($1::text[], $2::int)`

// Lock takes the locks of scopes, up to MaxScopes of them, as Charge would, until tx
// ends.
//
// Call it before several calls in tx that lock scopes one after the other, a credit and
// a charge for example, which could deadlock with another transaction that does it the
// other way round. (Two placements of holds still can, over the rows of holds that are due
// in their scopes, and over ids that the caller chose: see package holds.)
//
// And call it before reading, at READ COMMITTED, what a limit is made of, such as a
// capacity that the application keeps in tables of its own: another transaction that
// takes the same locks first cannot change it in between. Where the other side cannot
// take the locks, lock the row that it is in instead (FOR SHARE).
//
// Errors: *ArgumentError before any SQL; ErrBusy, and SQLSTATE 40P01 if tx had locked
// other scopes before: both abort tx.
func (l *Ledger) Lock(ctx context.Context, tx pgx.Tx, scopes ...string) error {
	if err := cmp.Or(l.made(), notNil("tx", tx)); err != nil {
		return err
	}
	if len(scopes) == 0 {
		return invalid("scopes", "are none")
	}
	for i, scope := range scopes {
		if err := checkScope(index("scopes", i, ""), scope); err != nil {
			return err
		}
	}
	scopes = slices.Clone(scopes)
	slices.Sort(scopes)
	if scopes = slices.Compact(scopes); len(scopes) > MaxScopes {
		return invalid("scopes", "are more than %d", MaxScopes)
	}
	_, err := tx.Exec(ctx, l.sql.lock, scopes, l.waitMS())
	return failed("lock", err)
}

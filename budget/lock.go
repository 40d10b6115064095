package budget

import (
	"cmp"
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
)

const lockSQL = `select metered.lock_scopes($1::text[], $2::int)`

// Lock takes the locks of up to MaxScopes scopes, as Charge does, until tx ends. Call it before several calls in tx
// that lock scopes, such as a credit and a charge: they cannot deadlock then. (Placements of holds still can: see
// package holds.) At READ COMMITTED, a row that you read after it is current if its writers take the same locks: a
// capacity in your own tables, for example (Limit.MaxFrom reads one in the call).
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

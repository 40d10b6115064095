package budget

import (
	"cmp"
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/bounds"
)

const lockSQL = `select metered.lock_scopes($1::text[], $2::int)`

// Lock locks up to 64 scopes until tx ends. Later calls on them in tx cannot deadlock, except
// placements of holds. At READ COMMITTED, a row read afterwards is current if its writers lock too.
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
	if scopes = slices.Compact(scopes); len(scopes) > bounds.MaxScopes {
		return invalid("scopes", "are more than %d", bounds.MaxScopes)
	}
	_, err := tx.Exec(ctx, l.sql.lock, scopes, l.waitMS())
	return failed("lock", err)
}

package schema_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Each array argument of each function of the application is refused with a null in it, in words and not as an error of the function's own.
func TestBounds_NoArrayHasANull(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	role := pgtest.AsRole(t, owner, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), "")
	rows, err := role.Query(t.Context(), `
		select p.proname::text, array_agg(format_type(x.typ, null) order by x.n), array_agg(coalesce(p.proargnames[x.n], '') order by x.n)
		from pg_proc p, unnest(p.proargtypes) with ordinality x(typ, n)
		where p.pronamespace = 'metered'::regnamespace and has_function_privilege(p.oid, 'execute') and p.proname not like '\_%'
		group by p.oid, p.proname order by p.proname`)
	require.NoError(t, err)
	type function struct {
		Name         string
		Types, Names []string
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[function])
	require.NoError(t, err)
	literals := map[string]string{"metered.scope_name": "'s'", "metered.amount": "1", "metered.units": "1", "metered.fingerprint": `decode(repeat('00', 33), 'hex')`}
	tried := 0
	for _, f := range all {
		for nth, typ := range f.Types {
			if !strings.HasSuffix(typ, "[]") || slices.Contains([]string{"windows", "periods", "issued"}, f.Names[nth]) {
				continue
			}
			args := make([]string, len(f.Types))
			for n, other := range f.Types {
				switch literal, known := literals[other]; {
				case n == nth:
					args[n] = "array[null]::" + typ
				case known:
					args[n] = literal + "::" + other
				default:
					args[n] = "null::" + other
				}
			}
			_, err := role.Exec(t.Context(), fmt.Sprintf("select metered.%s(%s)", f.Name, strings.Join(args, ", ")))
			var refused *pgconn.PgError
			require.ErrorAs(t, err, &refused, "%s: %s", f.Name, f.Names[nth])
			require.Equal(t, "22023", refused.Code, "%s: %s: %v", f.Name, f.Names[nth], err)
			tried++
		}
	}
	require.Greater(t, tried, 20)
}

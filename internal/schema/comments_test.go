package schema_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// Everything that a person can see in psql has a COMMENT: tables, views, their columns, types, and functions that a
// role may execute.
func TestComments_AreThereForAllThatIsPublic(t *testing.T) {
	t.Parallel()
	var public []string
	for _, f := range schema.Functions {
		public = append(public, f.Name)
	}
	pool := pgtest.Open(t)
	rows, err := pool.Query(t.Context(), `
		select c.relname::text || coalesce('.' || a.attname, '') as what
		from pg_class c left join pg_attribute a on a.attrelid = c.oid and a.attnum >= 0 and not a.attisdropped
		where c.relnamespace = 'metered'::regnamespace and c.relkind in ('r', 'v') and a.attnum > 0 and col_description(c.oid, a.attnum) is null
		union all
		select c.relname from pg_class c
		where c.relnamespace = 'metered'::regnamespace and c.relkind in ('r', 'v') and obj_description(c.oid, 'pg_class') is null
		union all
		select p.proname || '()' from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and p.proname = any ($1) and obj_description(p.oid, 'pg_proc') is null
		union all
		select t.typname || ' (type)' from pg_type t left join pg_class c on c.oid = t.typrelid
		where t.typnamespace = 'metered'::regnamespace and (t.typtype = 'd' or c.relkind = 'c') and obj_description(t.oid, 'pg_type') is null
		order by 1`, public)
	require.NoError(t, err)
	missing, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, missing)
}

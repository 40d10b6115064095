package privacy

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// furtherSQL has the columns of a table of the caller's that may have names in them.
const furtherSQL = `
select pg_catalog.format('%I.%I', n.nspname, c.relname), pg_catalog.quote_ident(a.attname), coalesce(e.typname, t.typname)::text, e.oid is not null
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
join pg_catalog.pg_type t on t.oid = a.atttypid
left join pg_catalog.pg_type e on e.oid = t.typelem and t.typcategory = 'A'
where c.oid = pg_catalog.to_regclass($1)::oid and coalesce(e.typname, t.typname) in ('text', 'varchar', 'bpchar', 'citext', 'json', 'jsonb')
order by a.attnum`

// further are the tables of Config.Tables.
func (r *Register) further(ctx context.Context, db querier) ([]table, error) {
	var all []table
	for i, name := range r.tables {
		var t table
		var column_, typ string
		var array bool
		rows, _ := answer.Query(ctx, db, furtherSQL, name)
		_, err := pgx.ForEachRow(rows, []any{&t.name, &column_, &typ, &array}, func() error {
			c := column{column_, text, typ}
			switch isJSON := typ == "json" || typ == "jsonb"; {
			case isJSON && array:
				c.kind = jsonList
			case isJSON:
				c.kind = json
			case array:
				c.kind = list
			}
			t.columns = append(t.columns, c)
			return nil
		})
		if err != nil {
			return nil, fault.Failed("privacy", "look at table "+name, err)
		}
		if len(t.columns) == 0 {
			return nil, misuse(fmt.Sprintf("Config.Tables[%d]", i),
				"%q is no table with columns of text or JSON", name)
		}
		all = append(all, t)
	}
	return all, nil
}

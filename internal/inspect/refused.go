package inspect

import (
	"context"
	"encoding/json"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

// refusedLooked is how many records RefusedLimits looks at.
const refusedLooked = MaxLooked / 10

// RefusedLimits are the limits of a scope that refused one of the newest 1,000 commands on record,
// the newest first, up to 16. Limits come with each call: the database has seen no others.
func (r *Reader) RefusedLimits(ctx context.Context, scope string) ([]budget.Limit, error) {
	if err := checkText("scope", scope); err != nil {
		return nil, err
	}
	limits, err := collect(ctx, r, refusedSQL, func(row pgx.CollectableRow) (l budget.Limit, err error) {
		var text []byte
		if err := row.Scan(&text); err != nil {
			return l, err
		}
		return l, json.Unmarshal(text, &l)
	}, scope, refusedLooked, bounds.MaxLimits)
	return limits, failed("refused limits", err)
}

const refusedSQL = `
select l.this::text
from (select o.at, o.refusal_limits from metered.operations_words o order by o.at desc limit $2) x,
    lateral (
        select (e.refusal -> 'limit'::text)::jsonb as this from pg_catalog.json_array_elements(
            case when pg_catalog.json_typeof(x.refusal_limits) = 'array' then x.refusal_limits end) e(refusal)
        where e.refusal ->> 'scope'::text = $1) l
group by l.this order by pg_catalog.max(x.at) desc limit $3`

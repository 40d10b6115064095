package otelmetered

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/metric"
)

// rowsSQL reads the planner's estimates: no table is read, and no right is needed.
const rowsSQL = `
select c.relname::text, greatest(c.reltuples, 0)::int8
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relkind = 'r' and c.relname = any($2)
order by 1`

// tables are those that grow, as purges name them: their keys are their names in the schema, of
// version 1 and of this one.
var tables = map[string]string{
	"ledger": "entries", "operations": "operations", "holds": "holds", "tokens": "tokens",
	"job_keys": "job_keys", "leases": "leases",
	"lots": "lots", "lot_rows": "lots", "lot_moves": "lot_moves",
}

// tablesTimeout bounds the query of a collection.
const tablesTimeout = 5 * time.Second

// WatchTables measures the rows of the tables of a schema, "" for "metered", as Postgres last
// estimated them: metered.table.rows, with one query for each collection. One process of all should
// do it. stop ends it.
func (o *Observer) WatchTables(pool *pgxpool.Pool, schema string) (stop func() error, err error) {
	if pool == nil {
		return nil, errors.New("otelmetered: pool is nil")
	}
	if schema == "" {
		schema = "metered"
	}
	names := make([]string, 0, len(tables))
	for name := range tables {
		names = append(names, name)
	}
	gauge, err := o.meter.Int64ObservableGauge("metered.table.rows", metric.WithUnit("{row}"),
		metric.WithDescription("Rows of a table, as Postgres last estimated them"))
	if err != nil {
		return nil, fmt.Errorf("otelmetered: %w", err)
	}
	r, err := o.meter.RegisterCallback(func(ctx context.Context, to metric.Observer) error {
		ctx, cancel := context.WithTimeout(ctx, tablesTimeout)
		defer cancel()
		rows, _ := pool.Query(ctx, rowsSQL, schema, names) // its error is that of the rows, too
		var name string
		var n int64
		_, err := pgx.ForEachRow(rows, []any{&name, &n}, func() error {
			to.ObserveInt64(gauge, n, metric.WithAttributes(labelTable.String(tables[name])))
			return nil
		})
		return err
	}, gauge)
	if err != nil {
		return nil, fmt.Errorf("otelmetered: %w", err)
	}
	return r.Unregister, nil
}

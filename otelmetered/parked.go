package otelmetered

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/metric"

	"github.com/pgmetered/metered/internal/schema"
)

// parkedSQL reads the lines, which keep counts, and the oldest job of each by an index.
const parkedSQL = `
select coalesce(pg_catalog.sum(p.waiting), 0)::int8, coalesce(extract(epoch from metered.clock() - pg_catalog.min(p.oldest_at)), 0)
from (select w.waiting, w.oldest_at from metered.parked_scopes_words w limit 10000) p`

// WatchParked measures the jobs that wait for budget, in up to 10,000 lines: metered.parked.jobs
// and metered.parked.age, with one query for each collection. One process of all should do it, with
// the grants of the application or of reports. schemaName is as in WatchTables. stop ends it.
func (o *Observer) WatchParked(pool *pgxpool.Pool,
	schemaName string) (stop func() error, err error) {
	jobs, err := o.meter.Int64ObservableGauge("metered.parked.jobs", metric.WithUnit("{job}"),
		metric.WithDescription("Jobs that wait for budget"))
	age, wrong := o.meter.Float64ObservableGauge("metered.parked.age", metric.WithUnit("s"),
		metric.WithDescription("How long the oldest parked job has waited"))
	return o.watch(pool, schemaName, parkedSQL, errors.Join(err, wrong),
		func(rows pgx.Rows, to metric.Observer) error {
			var n int64
			var oldest float64
			_, err := pgx.ForEachRow(rows, []any{&n, &oldest}, func() error {
				to.ObserveInt64(jobs, n)
				to.ObserveFloat64(age, max(0, oldest))
				return nil
			})
			return err
		}, jobs, age)
}

// watch gives the rows of a query to read at each collection. made is the error of the instruments.
func (o *Observer) watch(pool *pgxpool.Pool, schemaName, sql string, made error,
	read func(rows pgx.Rows, to metric.Observer) error,
	instruments ...metric.Observable) (stop func() error, err error) {
	if pool == nil {
		return nil, errors.New("otelmetered: pool is nil")
	}
	name, err := schema.Parse(schemaName)
	if err != nil {
		return nil, fmt.Errorf("otelmetered: schema: %w", err)
	}
	if made != nil {
		return nil, fmt.Errorf("otelmetered: %w", made)
	}
	sql = name.SQL(sql)
	r, err := o.meter.RegisterCallback(func(ctx context.Context, to metric.Observer) error {
		ctx, cancel := context.WithTimeout(ctx, tablesTimeout)
		defer cancel()
		rows, _ := pool.Query(ctx, sql) // its error is that of the rows, too
		return read(rows, to)
	}, instruments...)
	if err != nil {
		return nil, fmt.Errorf("otelmetered: %w", err)
	}
	return r.Unregister, nil
}

package otelmetered

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/metric"
)

// feedSQL reads a few rows a consumer. Before whole_at all entries have numbers. Later ones may have
// none, and the consumer cannot have them either.
const feedSQL = `
select f.consumer, coalesce(extract(epoch from metered.clock() - least(f.unread_since, f.whole_at)), 0)
from metered.feed_lag f limit 1000`

// WatchFeed measures how late the consumers of the feed are, up to 1,000: metered.feed.lag, with one
// query for each collection. So one that does not run, or that another process runs, is seen. One
// process of all should do it, with the grants of the application, of maintenance or of reports.
// schemaName is as in WatchTables. stop ends it.
func (o *Observer) WatchFeed(pool *pgxpool.Pool, schemaName string) (stop func() error, err error) {
	lag, err := o.meter.Float64ObservableGauge("metered.feed.lag", metric.WithUnit("s"),
		metric.WithDescription("How old an entry may be that a consumer of the feed has not consumed"))
	return o.watch(pool, schemaName, feedSQL, err, func(rows pgx.Rows, to metric.Observer) error {
		var consumer string
		var late float64
		_, err := pgx.ForEachRow(rows, []any{&consumer, &late}, func() error {
			to.ObserveFloat64(lag, max(0, late), metric.WithAttributes(labelConsumer.String(consumer)))
			return nil
		})
		return err
	}, lag)
}

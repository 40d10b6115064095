// Package otelmetered measures and traces the library with OpenTelemetry.
//
//	observer, err := otelmetered.New(otelmetered.Config{})
//	client, err := metered.New(pool, metered.Config{Observer: observer, River: queue})
//
// Its README has every metric and label, with the meaning of a rise. grafana/dashboard.json and
// prometheus/alerts.yaml are made of these.
//
// No label has scopes, subjects, keys or ids. Labels of the program's own words (names of commands,
// of limits and kinds of jobs) are bounded by Config.MaxNames. Spans have the ids of operations and
// jobs.
package otelmetered

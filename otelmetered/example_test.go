package otelmetered_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/otelmetered"
)

// Prometheus reads the metrics of this program, and its spans go where OpenTelemetry's global provider sends them.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()

	registry := prometheus.NewRegistry()
	reader, err := exporter.New(exporter.WithRegisterer(registry))
	if err != nil {
		log.Fatal(err)
	}
	observer, err := otelmetered.New(otelmetered.Config{MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))})
	if err != nil {
		log.Fatal(err)
	}
	queue, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins:    []rivertype.Plugin{jobs.Plugin()},
		Middleware: []rivertype.Middleware{observer.Middleware()},
	})
	if err != nil {
		log.Fatal(err)
	}
	client, err := metered.New(pool, metered.Config{River: queue, Config: budget.Config{Observer: observer}})
	if err != nil {
		log.Fatal(err)
	}
	metrics := promhttp.HandlerFor(registry, promhttp.HandlerOpts{}) // http.Handle("/metrics", metrics)

	for i := range 3 {
		_, err := metered.Do(ctx, client, metered.Command{
			ID: fmt.Sprint("request-", i), Name: "upload", Tenant: "ann",
			Charges: []budget.Charge{{Scope: "org/acme", Amount: 40, Limits: []budget.Limit{budget.PerWindow(100, time.Hour).Named("hourly")}}},
		}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Exec(ctx, "select 1") // your own writes
			return nil, err
		})
		fmt.Printf("code %q\n", metered.Code(err))
	}

	answer := httptest.NewRecorder()
	metrics.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(answer.Body.String()) {
		if strings.HasPrefix(line, `metered_refusals_total{metered_limit="hourly",`) {
			fmt.Println("refusals by the limit hourly:", line[strings.LastIndex(line, " ")+1:])
		}
	}
	// Output:
	// code ""
	// code ""
	// code "budget_exceeded"
	// refusals by the limit hourly: 1
}

package main

import (
	"context"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/otelmetered"
)

// observerFigures are the costs of metrics and traces.
var observerFigures = []figure{
	{
		name: "command_observer_on_vs_off", unit: "times as long", goal: atMost(1.02),
		meaning: "one client, whole commands over 1,000 scopes, with otelmetered: all metrics, and a trace of one in 100, against none",
		measure: on(options{conns: 2}, oneOf(1000), observerCost),
	},
}

// observerCost compares commands with an observer that traces one in 100 to commands without one, on one database.
func observerCost(ctx context.Context, b *bench, k *kit) (samples, error) {
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.TraceIDRatioBased(0.01)), sdktrace.WithSpanProcessor(dropped{}))
	observer, err := otelmetered.New(otelmetered.Config{MeterProvider: meters, TracerProvider: tracers})
	if err != nil {
		return samples{}, err
	}
	observed, err := metered.New(k.Pool, metered.Config{River: k.queue, LockTimeout: time.Minute, Observer: observer})
	if err != nil {
		return samples{}, err
	}
	by := func(name string, client *metered.Client) contender {
		c := k.commandBy(client)
		c.name, c.site = name, k.site
		return c
	}
	out, err := b.sequential(by("on", observed), by("off", k.client)).run(ctx, b)
	return out.cost("on", "off"), err
}

// dropped takes spans as an exporter's batch does, and drops them.
type dropped struct{}

func (dropped) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (dropped) OnEnd(sdktrace.ReadOnlySpan)                     {}
func (dropped) Shutdown(context.Context) error                  { return nil }
func (dropped) ForceFlush(context.Context) error                { return nil }

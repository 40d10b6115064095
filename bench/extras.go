package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/otelmetered"
)

// thresholdFigures are the costs of thresholds to a charge that crosses none.
var thresholdFigures = []figure{
	{"charge_thresholds_vs_without", "times as long", atMost(1.02), "one client, a charge over 1,000 scopes whose limit has two thresholds that are far, against one without",
		thresholdCost(charging(false))},
	{"charge_bound_thresholds_vs_without", "times as long", atMost(1.02), boundMeaning, thresholdCost(charging(true))},
	{"command_thresholds_vs_without", "times as long", atMost(1.02), "the same by bare commands",
		thresholdCost(func(ctx context.Context, k *kit, c budget.Charge) error {
			_, err := metered.Do[string](ctx, k.client, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{c}}, nil)
			return err
		}),
	},
}

func charging(quiet bool) func(context.Context, *kit, budget.Charge) error {
	return func(ctx context.Context, k *kit, c budget.Charge) error {
		c.NoStandings = quiet
		return k.charge(ctx, c)
	}
}

// thresholdCost compares charges with thresholds to charges without, on one database, each with
// scopes of its own.
func thresholdCost(charge func(context.Context, *kit, budget.Charge) error) func(context.Context, *bench) (samples, error) {
	return on(options{conns: 2}, inTurn(1000), func(ctx context.Context, b *bench, k *kit) (s samples, err error) {
		limit := roomy[0].WithThresholds(budget.Threshold{Name: "80%", Percent: 80}, budget.Threshold{Name: "used up"})
		k.client, err = metered.New(k.Pool, metered.Config{River: k.queue, Config: budget.Config{LockTimeout: time.Minute, OnThreshold: func(context.Context, pgx.Tx, budget.Crossing) error { return nil }}})
		if err != nil {
			return s, err
		}
		by := func(name, prefix string, limits ...budget.Limit) contender {
			return k.does(name, func(ctx context.Context) error {
				return charge(ctx, k, budget.Charge{Scope: prefix + k.scope(), Amount: 1, Limits: limits})
			})
		}
		with, without := by("with", "a", limit), by("without", "b", roomy...)
		for _, c := range []contender{with, without} { // so that all scopes have entries
			if _, _, err := drive(ctx, c.op, 1, time.Hour, 1000); err != nil {
				return s, err
			}
		}
		k.scope = oneOf(1000)
		return b.cost(ctx, with, without)
	})
}

// observerFigures are the costs of metrics and traces.
var observerFigures = []figure{
	{"command_observer_on_vs_off", "times as long", atMost(1.02), "one client, whole commands over 1,000 scopes, with otelmetered: all metrics, and a trace of one in 100, against none",
		on(options{conns: 2}, oneOf(1000), observerCost)},
}

// observerCost compares commands with an observer that traces one in 100 to commands without one,
// on one database.
func observerCost(ctx context.Context, b *bench, k *kit) (samples, error) {
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.TraceIDRatioBased(0.01)), sdktrace.WithBatcher(tracetest.NewNoopExporter()))
	defer func() { _ = tracers.Shutdown(context.WithoutCancel(ctx)) }()
	observer, err := otelmetered.New(otelmetered.Config{MeterProvider: meters, TracerProvider: tracers})
	if err != nil {
		return samples{}, err
	}
	observed, err := metered.New(k.Pool, metered.Config{River: k.queue, Config: budget.Config{LockTimeout: time.Minute, Observer: observer}})
	if err != nil {
		return samples{}, err
	}
	by := func(name string, client *metered.Client) contender {
		c := k.commandBy(client, false)
		c.name, c.site = name, k.site
		return c
	}
	return b.cost(ctx, by("on", observed), by("off", k.client))
}

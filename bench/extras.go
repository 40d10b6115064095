package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/otelmetered"
)

// thresholdFigures are the costs of thresholds to a charge that crosses none.
var thresholdFigures = []figure{
	{"charge_thresholds_vs_without", "times as long", atMost(1.02), "one client, a charge over 1,000 scopes whose limit has two thresholds that are far, against one without",
		thresholdCost(chargeBy(false))},
	{"charge_bound_thresholds_vs_without", "times as long", atMost(1.02), "the same by charges that ask for no standing, which a bound lets in",
		thresholdCost(chargeBy(true))},
	{"command_thresholds_vs_without", "times as long", atMost(1.02), "the same by bare commands",
		thresholdCost(func(ctx context.Context, client *metered.Client, _ *kit, c budget.Charge) error {
			_, err := metered.Do[string](ctx, client, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{c}}, nil)
			return err
		}),
	},
}

type charger func(context.Context, *metered.Client, *kit, budget.Charge) error

func chargeBy(quiet bool) charger {
	return func(ctx context.Context, client *metered.Client, k *kit, c budget.Charge) error {
		c.NoStandings = quiet
		return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			_, err := client.Budget.Charge(ctx, tx, c)
			return err
		})
	}
}

// thresholdCost compares charges with thresholds to charges without, on one database, each with scopes of its own.
func thresholdCost(charge charger) func(context.Context, *bench) (samples, error) {
	return on(options{conns: 2}, oneOf(1000), func(ctx context.Context, b *bench, k *kit) (samples, error) {
		limit := roomy[0].Tell(budget.Threshold{Name: "80%", Percent: 80}, budget.Threshold{Name: "used up"})
		telling, err := metered.New(k.Pool, metered.Config{River: k.queue, LockTimeout: time.Minute,
			OnThreshold: func(context.Context, pgx.Tx, budget.Crossing) error { return nil }})
		if err != nil {
			return samples{}, err
		}
		by := func(name, prefix string, limits ...budget.Limit) contender {
			return k.does(name, func(ctx context.Context) error {
				return charge(ctx, telling, k, budget.Charge{Scope: prefix + k.scope(), Amount: 1, Limits: limits})
			})
		}
		with, without := by("with", "a", limit), by("without", "b", roomy...)
		for i := range 1000 { // so that all scopes have entries
			for prefix, limits := range map[string][]budget.Limit{"a": {limit}, "b": roomy} {
				if err := charge(ctx, telling, k, budget.Charge{Scope: prefix + scopeName(i), Amount: 1, Limits: limits}); err != nil {
					return samples{}, err
				}
			}
		}
		out, err := b.sequential(with, without).run(ctx, b)
		return out.cost("with", "without"), err
	})
}

// observerFigures are the costs of metrics and traces.
var observerFigures = []figure{
	{"command_observer_on_vs_off", "times as long", atMost(1.02), "one client, whole commands over 1,000 scopes, with otelmetered: all metrics, and a trace of one in 100, against none",
		on(options{conns: 2}, oneOf(1000), observerCost)},
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

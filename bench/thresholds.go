package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// thresholdFigures are the costs of thresholds to a charge that crosses none.
var thresholdFigures = []figure{
	{
		name: "charge_thresholds_vs_without", unit: "times as long", goal: atMost(1.02),
		meaning: "one client, a charge over 1,000 scopes whose limit has two thresholds that are far, against one without",
		measure: thresholdCost(chargeBy(false)),
	},
	{
		name: "charge_bound_thresholds_vs_without", unit: "times as long", goal: atMost(1.02),
		meaning: "the same by charges that ask for no standing, which a bound lets in",
		measure: thresholdCost(chargeBy(true)),
	},
	{
		name: "command_thresholds_vs_without", unit: "times as long", goal: atMost(1.02),
		meaning: "the same by bare commands",
		measure: thresholdCost(func(ctx context.Context, client *metered.Client, _ *kit, c budget.Charge) error {
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
			return contender{name: name, site: k.site, op: func(ctx context.Context, _ int) error {
				return charge(ctx, telling, k, budget.Charge{Scope: prefix + k.scope(), Amount: 1, Limits: limits})
			}}
		}
		with, without := by("with", "a", limit), by("without", "b", roomy...)
		for i := range 1000 { // so that all scopes have entries
			for _, prefix := range []string{"a", "b"} {
				limits := map[string][]budget.Limit{"a": {limit}, "b": roomy}[prefix]
				if err := charge(ctx, telling, k, budget.Charge{Scope: prefix + scopeName(i), Amount: 1, Limits: limits}); err != nil {
					return samples{}, err
				}
			}
		}
		out, err := b.sequential(with, without).run(ctx, b)
		return out.cost("with", "without"), err
	})
}

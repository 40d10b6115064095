package main

import (
	"context"
	"fmt"
	"time"
)

// trendFigures are read from a row of measurements each, and drawn.
var trendFigures = []figure{
	{
		name: "charge_peak_rate", unit: "charges/s",
		meaning: "the best rate over 1,000 scopes, of all numbers of clients tried",
		measure: chargeByClients,
	},
	{
		name: "charge_window_1e6_seed_vs_metered", unit: "times the cost",
		meaning: "what the sum of the obvious design costs with a million entries in the window, against this library",
		measure: chargeLatencies,
	},
	{
		name: "command_hot_rtt2_vs_seed", unit: "times the rate",
		meaning: "whole commands/s, one scope, 32 clients, 2 ms round trip, against seed",
		measure: hotByRoundTrip,
	},
}

// chart adds a chart to the report.
func (b *bench) chart(c chart) { b.charts = append(b.charts, c) }

func chargeByClients(ctx context.Context, b *bench) (samples, error) {
	counts := []int{1, 2, 4, 8, 16, 32, 64}
	if b.short {
		counts = []int{1, 8, 32}
	}
	cons, drop, err := b.contenders(ctx, options{conns: counts[len(counts)-1]}, oneOf(1000),
		entry{"metered", chargeMetered}, entry{"floor", chargeFloor}, entry{"seed", chargeSeed})
	if err != nil {
		return samples{}, err
	}
	defer drop()
	cons[0].dissect = false
	drawn := chart{Title: "Charges over 1,000 scopes", X: "clients", Y: "charges/s", LogX: true, Lines: make([]line, len(cons))}
	var best samples
	for _, clients := range counts {
		out, err := comparison{contenders: cons, clients: clients, slice: b.slice() * 2 / 3, rounds: b.pick(2, 1)}.run(ctx, b)
		if err != nil {
			return samples{}, err
		}
		for i, con := range cons {
			drawn.Lines[i].Name = con.name
			drawn.Lines[i].Points = append(drawn.Lines[i].Points, point{float64(clients), median(out.rates[con.name])})
		}
		if median(out.rates["metered"]) > median(best.values) {
			best = samples{values: out.rates["metered"], where: out.where, note: fmt.Sprintf("with %d clients", clients)}
		}
	}
	b.chart(drawn)
	return best, nil
}

func chargeLatencies(ctx context.Context, b *bench) (samples, error) {
	c, err := b.chains(ctx)
	if err != nil {
		return samples{}, err
	}
	drawn := chart{
		Title: "A charge by the entries in its window", X: "entries in the window", Y: "µs", LogX: true, LogY: true,
		Lines: []line{{Name: "metered"}, {Name: "seed"}},
		Text:  "seed adds up what is in the window; the library takes a difference of two entries.",
	}
	var last outcome
	for _, size := range c.sizes {
		turns := comparison{clients: 1, count: 20, rounds: b.pick(20, 6)}
		if size > 10_000 {
			turns.count, turns.rounds = 5, b.pick(7, 3)
		}
		metered := c.on(size, turns.count, false, roomy)
		metered.name = "metered"
		turns.contenders = []contender{metered, c.seedOn(size, turns.count)}
		last, err = turns.run(ctx, b)
		if err != nil {
			return samples{}, err
		}
		for i, name := range []string{"metered", "seed"} {
			drawn.Lines[i].Points = append(drawn.Lines[i].Points, point{float64(size), 1e6 / median(last.rates[name])})
		}
	}
	b.chart(drawn)
	s := last.cost("seed", "metered")
	s.note += fmt.Sprintf("; %d entries", c.largest())
	return s, nil
}

func hotByRoundTrip(ctx context.Context, b *bench) (samples, error) {
	if !b.dissects {
		return samples{notRun: leftOut}, nil
	}
	trips := []time.Duration{0, 500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond}
	drawn := chart{
		Title: "One hot scope, whole commands", X: "round trip, ms (set at the proxy)", Y: "commands/s, 32 clients",
		Text: "locked floor: the same writes with the scope's lock; floor: without it.",
	}
	var last hotOutcome
	for _, trip := range trips {
		var err error
		if last, err = b.hot(ctx, trip); err != nil {
			return samples{}, err
		}
		for i, name := range last.names {
			if len(drawn.Lines) <= i {
				drawn.Lines = append(drawn.Lines, line{Name: name})
			}
			ms := float64(trip.Microseconds()) / 1000
			drawn.Lines[i].Points = append(drawn.Lines[i].Points, point{ms, median(last.rates[name])})
		}
	}
	b.chart(drawn)
	s := last.ratio("metered", "seed")
	s.note += others(last.outcome, "locked floor", "floor", "early") + last.seen()
	return s, nil
}

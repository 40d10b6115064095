package main

import (
	"context"
	"fmt"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
)

var commandFigures = []figure{
	{
		name: "command_vs_floor", unit: "times the rate", goal: atLeast(0.65),
		meaning: "whole commands/s (token, job, charge, operation) over 1,000 scopes, 8 clients, against the same writes unchecked",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.compare(ctx, comparison{clients: 8, slice: b.slice(), rounds: b.rounds()}, options{}, oneOf(1000),
				entry{"metered", commandMetered}, entry{"floor", commandFloor}, entry{"seed", commandSeed})
			s := out.ratio("metered", "floor")
			s.note += others(out, "seed")
			return s, err
		},
	},
	{
		name: "command_hot_rtt1_vs_locked_floor", unit: "times the rate", goal: atLeast(0.90),
		meaning: "whole commands/s, one scope, 32 clients, 1 ms round trip, against floor with the scope's lock",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			hot, err := b.hot(ctx, time.Millisecond)
			s := hot.ratio("metered", "locked floor")
			s.note += others(hot.outcome, "floor") + " (without the lock)" + hot.seen()
			return s, err
		},
	},
	{
		name: "command_hot_rtt1_vs_seed", unit: "times the rate",
		meaning: "the same against seed",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			hot, err := b.hot(ctx, time.Millisecond)
			s := hot.ratio("metered", "seed")
			s.note += hot.seen()
			return s, err
		},
	},
	{
		name: "command_hot_commit2ms_early_vs_plain", unit: "times the rate",
		meaning: "early lock release against the plain command, one scope, 64 clients, commits slowed to 2 ms",
		measure: slowCommits,
	},
	{
		name: "command_hot_commit2ms_scopes_4_vs_1", unit: "times the rate",
		meaning: "early lock release on 4 scopes against one, 64 clients, commits slowed to 2 ms: the most that perfect stripes would bring",
		measure: spreadCommits,
	},
}

// others are the rates that a ratio leaves out.
func others(o outcome, names ...string) (text string) {
	for _, name := range names {
		text += fmt.Sprintf(", %s %s/s", name, number(median(o.rates[name])))
	}
	return text
}

// hotOutcome is that of all contenders on one scope, 32 clients.
type hotOutcome struct {
	outcome
	roundTrip time.Duration // as seen by a bare statement
}

func (h hotOutcome) seen() string {
	return fmt.Sprintf("; a bare statement takes %.2f ms", float64(h.roundTrip.Microseconds())/1000)
}

// hot measures them behind a proxy of that round trip. Several figures and a chart
// are read from it.
func (b *bench) hot(ctx context.Context, roundTrip time.Duration) (hotOutcome, error) {
	return share(b, "hot "+roundTrip.String(), func() (hotOutcome, error) {
		p, err := startProxy(b.connString, roundTrip)
		if err != nil {
			return hotOutcome{}, err
		}
		defer p.close()
		var h hotOutcome
		if h.roundTrip, err = p.bareStatement(ctx, b.connString); err != nil {
			return h, err
		}
		c := comparison{clients: 32, slice: b.slice(), rounds: b.rounds()}
		cons, drop, err := b.contenders(ctx, options{dial: p.dial, conns: c.clients}, hotScope,
			entry{"metered", commandMetered}, entry{"locked floor", commandLockedFloor}, entry{"floor", commandFloor},
			entry{"leased", commandLeased}, entry{"seed", commandSeed})
		if err != nil {
			return h, err
		}
		defer drop()
		c.contenders = cons
		h.outcome, err = c.run(ctx, b)
		return h, err
	})
}

// slowServer is a server whose commits take 2 ms.
func slowServer(ctx context.Context, b *bench) (*pgserver.Server, error) {
	return pgserver.Start(ctx, pgserver.Options{Durable: true, Private: true, Log: b.log, Settings: map[string]string{
		"commit_delay": "2000", "commit_siblings": "0", "max_connections": "300",
	}})
}

func slowCommits(ctx context.Context, b *bench) (samples, error) {
	return b.withSlowCommits(ctx, b.pick(5, 2), "early release", "plain",
		entry{"early release", commandReleased}, entry{"plain", commandMetered}, entry{"locked floor", commandLockedFloor})
}

func spreadCommits(ctx context.Context, b *bench) (samples, error) {
	if !b.thorough {
		return samples{notRun: leftOut}, nil
	}
	over := func(scopes int) func(*kit) contender {
		return func(k *kit) contender {
			k.scope = oneOf(scopes)
			c := commandReleased(k)
			return c
		}
	}
	return b.withSlowCommits(ctx, b.pick(3, 1), "4 scopes", "1 scope",
		entry{"4 scopes", over(4)}, entry{"1 scope", over(1)}, entry{"64 scopes", over(64)})
}

// withSlowCommits is the ratio of the contenders a and z, and the rate of the last one
// of three, on a server of their own. Their scope is one, if they choose no other.
func (b *bench) withSlowCommits(ctx context.Context, rounds int, a, z string, entries ...entry) (samples, error) {
	server, err := slowServer(ctx, b)
	if err != nil && ctx.Err() == nil {
		return samples{notRun: "needs a server of its own: " + err.Error()}, nil
	}
	if err != nil {
		return samples{}, err
	}
	defer server.Stop()
	out, err := b.compare(ctx, comparison{clients: 64, slice: b.slice(), rounds: rounds}, options{server: server.ConnString()}, hotScope, entries...)
	s := out.ratio(a, z)
	s.note += others(out, entries[2].name)
	return s, err
}

// commandReleased is the library's with early lock release.
func commandReleased(k *kit) contender {
	return contender{stock: k.stockTokens, op: func(ctx context.Context, _ int) error {
		return k.doWith(ctx, nil, func(c *metered.Command) { c.EarlyRelease = true })
	}}
}

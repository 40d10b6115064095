package main

import (
	"context"
	"fmt"
	"time"

	"github.com/pgmetered/metered/internal/pgserver"
)

var commandFigures = []figure{
	rates("command_vs_floor", atLeast(0.65),
		"whole commands/s (token, job, charge, operation) over 1,000 scopes, 8 clients, against the same writes unchecked",
		oneOf(1000), entry{"metered", commandMetered}, entry{"floor", commandFloor}, entry{"seed", commandSeed}),
	hotFigure("command_hot_rtt1_vs_locked_floor", atLeast(0.90), "metered", "locked floor",
		"whole commands/s, one scope, 32 clients, 1 ms round trip, against floor with the scope's lock"),
	hotFigure("command_hot_rtt1_vs_seed", goal{}, "metered", "seed", "the same against seed"),
	{
		name: "command_hot_commit2ms_early_vs_plain", unit: "times the rate",
		meaning: "early lock release against the plain command, one scope, 64 clients, commits slowed to 2 ms",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			return b.withSlowCommits(ctx, b.pick(5, 2),
				entry{"early release", commandReleased}, entry{"plain", commandMetered}, entry{"locked floor", commandLockedFloor})
		},
	},
	{
		name: "command_hot_commit2ms_scopes_4_vs_1", unit: "times the rate",
		meaning: "early lock release on 4 scopes against one, 64 clients, commits slowed to 2 ms: the most that perfect stripes would bring",
		measure: spreadCommits,
	},
}

// hotFigure is the rate of contender a by that of b on a hot scope.
func hotFigure(name string, g goal, a, b, meaning string) figure {
	return figure{name: name, unit: "times the rate", goal: g, meaning: meaning, measure: func(ctx context.Context, bench *bench) (samples, error) {
		hot, err := bench.hot(ctx, time.Millisecond)
		s := hot.ratio(a, b)
		s.note += fmt.Sprintf("; a bare statement takes %.2f ms", float64(hot.roundTrip.Microseconds())/1000)
		return s, err
	}}
}

// hotOutcome is that of all contenders on one scope, 32 clients.
type hotOutcome struct {
	outcome
	roundTrip time.Duration // as seen by a bare statement
}

// hot measures them behind a proxy of that round trip. Several figures
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
		c := b.concurrent(32)
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

func spreadCommits(ctx context.Context, b *bench) (samples, error) {
	if !b.thorough {
		return samples{notRun: leftOut}, nil
	}
	over := func(scopes int) func(*kit) contender {
		return func(k *kit) contender {
			k.scope = oneOf(scopes)
			return commandReleased(k)
		}
	}
	return b.withSlowCommits(ctx, b.pick(3, 1),
		entry{"4 scopes", over(4)}, entry{"1 scope", over(1)}, entry{"64 scopes", over(64)})
}

// withSlowCommits is the ratio of the first two contenders, on a server of their own.
// Their scope is one, if they choose no other.
func (b *bench) withSlowCommits(ctx context.Context, rounds int, entries ...entry) (samples, error) {
	server, err := slowServer(ctx, b)
	if err != nil && ctx.Err() == nil {
		return samples{notRun: "needs a server of its own: " + err.Error()}, nil
	}
	if err != nil {
		return samples{}, err
	}
	defer server.Stop()
	out, err := b.compare(ctx, comparison{clients: 64, slice: b.slice(), rounds: rounds}, options{server: server.ConnString()}, hotScope, entries...)
	return out.ratio(entries[0].name, entries[1].name), err
}

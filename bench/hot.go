package main

import (
	"context"
	"time"

	"github.com/pgmetered/metered/internal/pgserver"
)

var commandFigures = []figure{
	rates("command_vs_floor", atLeast(0.65),
		"whole commands/s (token, job, charge, operation) over 1,000 scopes, 8 clients, against the same writes unchecked",
		oneOf(1000), entry{"metered", commandMetered}, entry{"floor", commandFloor}),
	hotFigure("command_hot_rtt1_vs_locked_floor", atLeast(0.90), "metered", "locked floor",
		"whole commands/s, one scope, 32 clients, 1 ms round trip, against floor with the scope's lock"),
	{"command_hot_commit2ms_early_vs_plain", "times the rate", goal{}, "early lock release against the plain command, one scope, 64 clients, commits slowed to 2 ms",
		func(ctx context.Context, b *bench) (samples, error) {
			return b.withSlowCommits(ctx, b.pick(5, 2),
				entry{"early release", commandReleased}, entry{"plain", commandMetered}, entry{"locked floor", commandLockedFloor})
		},
	},
	{"command_hot_commit2ms_scopes_4_vs_1", "times the rate", goal{}, "early lock release on 4 scopes against one, 64 clients, commits slowed to 2 ms: the most that perfect stripes would bring",
		spreadCommits},
}

// hotFigure is the rate of contender a by that of b on a hot scope.
func hotFigure(name string, g goal, a, b, meaning string) figure {
	return figure{name: name, unit: "times the rate", goal: g, meaning: meaning, measure: func(ctx context.Context, bench *bench) (samples, error) {
		out, err := bench.hot(ctx)
		return out.ratio(a, b), err
	}}
}

// hot is all contenders on one scope, by 32 clients, behind a proxy with a round trip of 1 ms. Several figures are read
// from it.
func (b *bench) hot(ctx context.Context) (outcome, error) {
	return share(b, "hot", func() (outcome, error) {
		p, err := startProxy(time.Millisecond)
		if err != nil {
			return outcome{}, err
		}
		defer p.close()
		return b.compare(ctx, b.concurrent(32), options{dial: p.dial}, hotScope,
			entry{"metered", commandMetered}, entry{"locked floor", commandLockedFloor}, entry{"floor", commandFloor}, entry{"leased", commandLeased})
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

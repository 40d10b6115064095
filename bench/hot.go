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
	rates("command_vs_counter_row", atLeast(1),
		"commands of one charge a second over 1,000 scopes, 8 clients, against one by hand: a key, a counter row, a row of its history, and the answer; no windows",
		oneOf(1000), entry{"metered", commandCharge}, entry{"counter", commandCounter}),
	rates("command_bare_vs_counter_row", atLeast(1), "the same by a command without a function, in one flush",
		oneOf(1000), entry{"bare", commandBare}, entry{"counter", commandCounter}),
	rates("command_declared_vs_counter_row", atLeast(1), "the same by a command of one declared statement, an insert, in one flush, against one by hand with that insert",
		oneOf(1000), entry{"declared", commandDeclared}, entry{"counter", commandCounterWriting}),
	sequentialAt("command_bare_rtt1_vs_counter_row", atMost(0.65), "the time of a command without a function by that of one by hand; one client, 1 ms round trip",
		entry{"bare", commandBare}, entry{"counter", commandCounter}),
	sequentialAt("command_declared_rtt1_vs_counter_row", atMost(0.75), "the same of a declared statement, an insert, against one by hand with that insert",
		entry{"declared", commandDeclared}, entry{"counter", commandCounterWriting}),
	ratio("command_hot_rtt1_vs_locked_floor", atLeast(0.90), "whole commands/s, one scope, 32 clients, 1 ms round trip, against floor with the scope's lock",
		"metered", "locked floor", (*bench).hot),
	ratio("command_total_rtt1_vs_without", atLeast(0.95),
		"commands/s of one charge over 1,000 scopes that also add to one scope of all, without limits, against the same without it; 8 clients, 1 ms round trip",
		"with total", "without", (*bench).total),
	slowCommits("command_hot_commit2ms_early_vs_plain", goal{}, "early lock release against the plain command, one scope, 64 clients, commits slowed to 2 ms",
		entry{"early release", commandReleased}, entry{"plain", commandMetered}, entry{"locked floor", commandLockedFloor}),
}

// hot is all contenders on one scope, by 32 clients, behind a proxy with a round trip of 1 ms.
// Several figures are read from it.
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

// sequentialAt is the time of the first contender by that of the second, by one client behind a round trip of 1 ms.
func sequentialAt(name string, g goal, meaning string, entries ...entry) figure {
	return figure{name: name, unit: "times the time", goal: g, meaning: meaning, measure: func(ctx context.Context, b *bench) (samples, error) {
		p, err := startProxy(time.Millisecond)
		if err != nil {
			return samples{}, err
		}
		defer p.close()
		out, err := b.compare(ctx, b.sequential(), options{dial: p.dial}, oneOf(1000), entries...)
		return out.cost(entries[0].name, entries[1].name), err
	}}
}

// total is a command with and without a charge of a total that all clients share, on one that limits
// nothing.
func (b *bench) total(ctx context.Context) (outcome, error) {
	p, err := startProxy(time.Millisecond)
	if err != nil {
		return outcome{}, err
	}
	defer p.close()
	return b.compare(ctx, b.concurrent(8), options{dial: p.dial}, oneOf(1000),
		entry{"with total", commandTotal}, entry{"without", commandCharge})
}

// slowServer is a server whose commits take 2 ms.
func slowServer(ctx context.Context, b *bench) (*pgserver.Server, error) {
	server, err := pgserver.Start(ctx, pgserver.Options{Durable: true, Private: true, Log: b.log, Settings: map[string]string{
		"commit_delay": "2000", "commit_siblings": "0", "max_connections": "300",
	}})
	if err != nil {
		err = notRun("needs a server of its own: " + err.Error())
	}
	return server, err
}

// slowCommits is the rate of the first contender by that of the second, by 64 clients of one scope
// on a slow server.
func slowCommits(name string, g goal, meaning string, entries ...entry) figure {
	return ratio(name, g, meaning, entries[0].name, entries[1].name, func(b *bench, ctx context.Context) (outcome, error) {
		server, err := slowServer(ctx, b)
		if err != nil {
			return outcome{}, err
		}
		defer server.Stop()
		return b.compare(ctx, b.concurrent(64), options{server: server.ConnString()}, hotScope, entries...)
	})
}

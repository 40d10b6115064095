package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

var leaseFigures = []figure{
	leaseFigure("lease_hot_vs_unlocked_floor", atLeast(0.7), 8, "floor",
		"charges/s from leases of one scope, 8 clients, against the bare insert of the same rows: no lock, no check"),
	leaseFigure("lease_hot_64_vs_unlocked_floor", atLeast(0.7), 64, "floor", "the same with 64 clients"),
	leaseFigure("lease_hot_vs_direct", atLeast(5), 8, "direct", "charges/s from leases of one scope, 8 clients, against direct charges of it"),
	leaseFigure("lease_hot_vs_counter_row", atLeast(4), 8, "counter",
		"the same against a counter by hand: an UPDATE of one hot row where it fits, and an INSERT, in one function"),
	hotFigure("command_hot_rtt1_leased_vs_unlocked_floor", atLeast(0.65), "leased", "floor",
		"whole commands/s that charge from leases, one scope, 32 clients, 1 ms round trip, against floor without any lock"),
	{
		name: "command_hot_commit2ms_leased_vs_plain", unit: "times the rate", goal: atLeast(6),
		meaning: "whole commands/s that charge from leases against plain ones, one scope, 64 clients, commits slowed to 2 ms",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			return b.withSlowCommits(ctx, b.pick(5, 2), entry{"leased", commandLeased}, entry{"plain", commandMetered}, entry{"floor", commandFloor})
		},
	},
}

func leaseFigure(name string, g goal, clients int, against, meaning string) figure {
	return figure{name: name, unit: "times the rate", goal: g, meaning: meaning, measure: func(ctx context.Context, b *bench) (samples, error) {
		out, err := b.leased(ctx, clients)
		return out.ratio("leased", against), err
	}}
}

// leased is charges of one scope by so many clients: from leases, directly, and unchecked.
func (b *bench) leased(ctx context.Context, clients int) (outcome, error) {
	return share(b, fmt.Sprint("leased ", clients), func() (outcome, error) {
		return b.compare(ctx, b.concurrent(clients), options{}, hotScope,
			entry{"leased", chargeLeased}, entry{"floor", spendFloor}, entry{"direct", chargeMetered}, entry{"counter", chargeCounter})
	})
}

// lease is a Pool for all scopes, until the kit is dropped.
func (k *kit) lease(rule leases.Rule) (*leases.Pool, error) {
	ledger, err := budget.New(budget.Config{LockTimeout: time.Minute})
	if err != nil {
		return nil, err
	}
	p, err := leases.New(k.Pool, ledger, leases.Config{Rules: []leases.Rule{rule}})
	if err == nil {
		k.pools = append(k.pools, p)
	}
	return p, err
}

// drop gives all leases back.
func (k *kit) drop() {
	for _, p := range k.pools {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		_ = p.Close(ctx)
		cancel()
	}
	k.site.drop()
}

// hotRule keeps slices while it is the others' turn: a scope that is hot has no pauses.
var hotRule = leases.Rule{TTL: time.Minute, Idle: time.Minute}

// chargeLeased is the library's, from leases.
func chargeLeased(k *kit) contender {
	p, failed := k.lease(hotRule)
	return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		if failed != nil {
			return failed
		}
		_, err := p.Charge(ctx, tx, budget.Charge{Scope: k.scope(), Amount: 1, Limits: roomy})
		return err
	})
}

// spendFloorSQL is a spend without anything but the row.
const spendFloorSQL = `
insert into metered.lease_spends (lease, at_offset, amount, at) values (0, nextval('metered.bench_seq'), 1, clock_timestamp())`

func spendFloor(k *kit) contender {
	return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, spendFloorSQL)
		return err
	})
}

// commandLeased is the library's command, whose charges come from leases.
func commandLeased(k *kit) contender {
	p, err := k.lease(hotRule)
	var client *metered.Client
	if err == nil {
		client, err = metered.New(k.Pool, metered.Config{River: k.queue, LockTimeout: time.Minute, Leases: p})
	}
	if err != nil {
		return contender{op: func(context.Context, int) error { return err }}
	}
	return k.commandBy(client)
}

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

var leaseFigures = []figure{
	{
		name: "lease_hot_vs_unlocked_floor", unit: "times the rate", goal: atLeast(0.7),
		meaning: "charges/s from leases of one scope, 8 clients, against the bare insert of the same rows: no lock, no check",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.leased(ctx, 8)
			s := out.ratio("leased", "floor")
			s.note += others(out, "direct")
			return s, err
		},
	},
	{
		name: "lease_hot_64_vs_unlocked_floor", unit: "times the rate", goal: atLeast(0.7),
		meaning: "the same with 64 clients",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.leased(ctx, 64)
			s := out.ratio("leased", "floor")
			s.note += others(out, "direct")
			return s, err
		},
	},
	{
		name: "lease_hot_vs_direct", unit: "times the rate", goal: atLeast(5),
		meaning: "charges/s from leases of one scope, 8 clients, against direct charges of it",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.leased(ctx, 8)
			return out.ratio("leased", "direct"), err
		},
	},
	{
		name: "lease_hot_vs_counter_row", unit: "times the rate", goal: atLeast(4),
		meaning: "the same against a counter by hand: an UPDATE of one hot row where it fits, and an INSERT, in one function",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.leased(ctx, 8)
			return out.ratio("leased", "counter"), err
		},
	},
	{
		name: "command_hot_rtt1_leased_vs_unlocked_floor", unit: "times the rate", goal: atLeast(0.65),
		meaning: "whole commands/s that charge from leases, one scope, 32 clients, 1 ms round trip, against floor without any lock",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			hot, err := b.hot(ctx, time.Millisecond)
			s := hot.ratio("leased", "floor")
			s.note += others(hot.outcome, "metered") + hot.seen()
			return s, err
		},
	},
	{
		name: "command_hot_commit2ms_leased_vs_plain", unit: "times the rate", goal: atLeast(6),
		meaning: "whole commands/s that charge from leases against plain ones, one scope, 64 clients, commits slowed to 2 ms",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			return b.withSlowCommits(ctx, b.pick(5, 2), "leased", "plain",
				entry{"leased", commandLeased}, entry{"plain", commandMetered}, entry{"floor", commandFloor})
		},
	},
}

// leased is charges of one scope by so many clients: from leases, directly, and unchecked.
func (b *bench) leased(ctx context.Context, clients int) (outcome, error) {
	return share(b, fmt.Sprint("leased ", clients), func() (outcome, error) {
		return b.compare(ctx, comparison{clients: clients, slice: b.slice(), rounds: b.rounds()}, options{setUp: slices.Clone(counterSetUp)}, hotScope,
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
	p, err := k.lease(hotRule)
	return contender{op: func(ctx context.Context, _ int) error {
		if err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			_, err := p.Charge(ctx, tx, budget.Charge{Scope: k.scope(), Amount: 1, Limits: roomy})
			return err
		})
	}}
}

// spendFloorSQL is a spend without anything but the row.
const spendFloorSQL = `
insert into metered.lease_spends (lease, at_offset, amount, at) values (0, nextval('metered.bench_seq'), 1, clock_timestamp())`

func spendFloor(k *kit) contender {
	return contender{op: func(ctx context.Context, _ int) error {
		return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, spendFloorSQL)
			return err
		})
	}}
}

// commandLeased is the library's command, whose charges come from leases.
func commandLeased(k *kit) contender {
	p, err := k.lease(hotRule)
	var client *metered.Client
	if err == nil {
		client, err = metered.New(k.Pool, metered.Config{River: k.queue, LockTimeout: time.Minute, Leases: p})
	}
	return contender{stock: k.stockTokens, op: func(ctx context.Context, _ int) error {
		if err != nil {
			return err
		}
		return k.doBy(ctx, client, nil)
	}}
}

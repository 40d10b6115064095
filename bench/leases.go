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
	ratio("lease_hot_vs_unlocked_floor", atLeast(0.7), "charges/s from leases of one scope, 8 clients, against the bare insert of the same rows: no lock, no check",
		"leased", "floor", leased(8)),
	ratio("lease_hot_64_vs_unlocked_floor", atLeast(0.7), "the same with 64 clients", "leased", "floor", leased(64)),
	ratio("lease_hot_vs_direct", atLeast(5), "charges/s from leases of one scope, 8 clients, against direct charges of it", "leased", "direct", leased(8)),
	ratio("lease_hot_vs_counter_row", atLeast(4), "the same against a counter by hand: an UPDATE of one hot row where it fits, and an INSERT, in one function",
		"leased", "counter", leased(8)),
	ratio("command_hot_rtt1_leased_vs_unlocked_floor", atLeast(0.65), "whole commands/s that charge from leases, one scope, 32 clients, 1 ms round trip, against floor without any lock",
		"leased", "floor", (*bench).hot),
	slowCommits("command_hot_commit2ms_leased_vs_plain", atLeast(6), "whole commands/s that charge from leases against plain ones, one scope, 64 clients, commits slowed to 2 ms",
		entry{"leased", commandLeased}, entry{"plain", commandMetered}, entry{"floor", commandFloor}),
}

// leased is charges of one scope by so many clients: from leases, directly, and unchecked.
func leased(clients int) func(*bench, context.Context) (outcome, error) {
	return func(b *bench, ctx context.Context) (outcome, error) {
		return share(b, fmt.Sprint("leased ", clients), func() (outcome, error) {
			return b.compare(ctx, b.concurrent(clients), options{}, hotScope,
				entry{"leased", chargeLeased}, entry{"floor", spendFloor}, entry{"direct", chargeMetered}, entry{"counter", chargeCounter})
		})
	}
}

// lease is a Pool for all scopes, until the kit is dropped.
func (k *kit) lease(rule leases.Rule) (*leases.Pool, error) {
	p, err := leases.New(k.Pool, k.client.Budget, leases.Config{Rules: []leases.Rule{rule}})
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
		_, err := p.Charge(ctx, tx, unit(k.scope()))
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
		client, err = metered.New(k.Pool, metered.Config{River: k.queue, Config: budget.Config{LockTimeout: time.Minute}, Leases: p})
	}
	if err != nil {
		return contender{op: func(context.Context, int) error { return err }}
	}
	return k.commandBy(client, false)
}

var carveFigures = []figure{{"carve_two_clusters", "times the rate", atLeast(1.8), "commands/s of two servers under one budget, half of it carved for the second, against those of one, 32 clients each, commits slowed to 2 ms",
	twoClusters}}

// twoClusters charges one scope at home, or that and a child of it on another server. The
// processors are not the limit: each scope is a chain of commits.
func twoClusters(ctx context.Context, b *bench) (samples, error) {
	const clients = 32
	var kits [2]*kit
	for i := range kits {
		server, err := slowServer(ctx, b)
		if err != nil {
			return samples{}, err
		}
		defer server.Stop()
		if kits[i], err = b.kit(ctx, options{server: server.ConnString(), conns: 2 * clients}, nil); err != nil {
			return samples{}, err
		}
		defer kits[i].drop()
	}
	if err := carveHalf(ctx, kits); err != nil {
		return samples{}, err
	}
	spend := func(ctx context.Context, on int) error {
		_, err := metered.Do[int](ctx, kits[on].client, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{
			{Scope: [...]string{"acme", "acme/away"}[on], Amount: 1, Limits: []budget.Limit{budget.Prepaid(0)}},
		}}, nil)
		return err
	}
	both := contender{name: "two clusters", op: func(ctx context.Context, client int) error { return spend(ctx, client%2) }}
	one := contender{name: "one", op: func(ctx context.Context, client int) error {
		if client >= clients {
			return errOut
		}
		return spend(ctx, 0)
	}}
	out, err := comparison{clients: 2 * clients, slice: b.slice(), rounds: b.rounds(), contenders: []contender{both, one}}.run(ctx, b)
	return out.ratio(both.name, one.name), err
}

// carveHalf gives the first database a budget, and half of it to the second. How it gets there is
// not measured.
func carveHalf(ctx context.Context, kits [2]*kit) error {
	const all = 1 << 40
	ledger := kits[0].client.Budget
	carver, err := leases.NewCarver(ledger)
	if err != nil {
		return err
	}
	var l leases.Lease
	err = pgx.BeginFunc(ctx, kits[0], func(tx pgx.Tx) (err error) {
		if _, err = ledger.Credit(ctx, tx, budget.Credit{Scope: "acme", Amount: all}); err != nil {
			return err
		}
		l, err = carver.Carve(ctx, tx, leases.Carving{
			Child: "acme/away", Away: true, TTL: time.Hour,
			From: budget.Charge{Scope: "acme", Amount: all / 2, Limits: []budget.Limit{budget.Prepaid(0)}},
		})
		return err
	})
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, kits[1], func(tx pgx.Tx) error {
		_, err := carver.Receive(ctx, tx, leases.Lease{Child: l.Child, Granted: l.Granted, EndsAt: l.EndsAt}, budget.Note{})
		return err
	})
}

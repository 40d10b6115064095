package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

var carveFigures = []figure{{
	name: "carve_two_clusters", unit: "times the rate", goal: atLeast(1.8),
	meaning: "commands/s of two servers under one budget, half of it carved for the second, against those of one, 32 clients each, commits slowed to 2 ms",
	measure: twoClusters,
}}

// twoClusters charges one scope at home, or that and a child of it on another server. The processors are not the
// limit: each scope is a chain of commits.
func twoClusters(ctx context.Context, b *bench) (samples, error) {
	const clients = 32
	var sites [2]*site
	var clientOf [2]*metered.Client
	var carvers [2]*leases.Carver
	for i := range sites {
		server, err := slowServer(ctx, b)
		if err != nil && ctx.Err() == nil {
			return samples{notRun: "needs servers of its own: " + err.Error()}, nil
		}
		if err != nil {
			return samples{}, err
		}
		defer server.Stop()
		if sites[i], err = b.open(ctx, options{server: server.ConnString(), conns: 2 * clients}); err != nil {
			return samples{}, err
		}
		defer sites[i].drop()
		if clientOf[i], err = metered.New(sites[i].Pool, metered.Config{}); err != nil {
			return samples{}, err
		}
		if carvers[i], err = leases.NewCarver(clientOf[i].Budget); err != nil {
			return samples{}, err
		}
	}
	if err := carveHalf(ctx, sites, clientOf[0].Budget, carvers); err != nil {
		return samples{}, err
	}
	spend := func(ctx context.Context, on int) error {
		_, err := metered.Do[int](ctx, clientOf[on], metered.Command{ID: metered.NewID(), Charges: []budget.Charge{
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

// carveHalf gives the first site a budget, and half of it to the second. How it gets there is not measured.
func carveHalf(ctx context.Context, sites [2]*site, ledger *budget.Ledger, carvers [2]*leases.Carver) error {
	const all = 1 << 40
	var l leases.Lease
	err := pgx.BeginFunc(ctx, sites[0], func(tx pgx.Tx) (err error) {
		if _, err = ledger.Credit(ctx, tx, budget.Credit{Scope: "acme", Amount: all}); err != nil {
			return err
		}
		l, err = carvers[0].Carve(ctx, tx, leases.Carving{
			Child: "acme/away", Away: true, TTL: time.Hour,
			From: budget.Charge{Scope: "acme", Amount: all / 2, Limits: []budget.Limit{budget.Prepaid(0)}},
		})
		return err
	})
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, sites[1], func(tx pgx.Tx) error {
		_, err := carvers[1].Receive(ctx, tx, leases.Lease{Child: l.Child, Granted: l.Granted, EndsAt: l.EndsAt}, budget.Note{})
		return err
	})
}

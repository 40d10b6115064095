package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// batchClients make batches, or single charges, at once. Each has 1,000 scopes of its own: batches
// do not wait for each other.
const batchClients = 8

// ownScopes are the scopes of each client, in turns.
type ownScopes [batchClients]int

func (s *ownScopes) next(client int) string {
	s[client]++
	return scopeName(client*1000 + s[client]%1000)
}

// batchOf makes n charges in one call.
func batchOf(n int) func(*kit) contender {
	return func(k *kit) contender {
		var scopes ownScopes
		return contender{op: func(ctx context.Context, client int) error {
			return k.chargeEach(ctx, units(n, func() string { return scopes.next(client) }))
		}}
	}
}

func (k *kit) chargeEach(ctx context.Context, charges []budget.Charge) error {
	return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error { return allMade(k.client.Budget.ChargeEach(ctx, tx, charges...)) })
}

func (k *kit) ingest(ctx context.Context, events []budget.UsageEvent) error {
	return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error { return allMade(k.client.Budget.Ingest(ctx, tx, events...)) })
}

// allMade is the first error of all.
func allMade(results []budget.Result, err error) error {
	for _, r := range results {
		err = cmp.Or(err, r.Err)
	}
	return err
}

func singleCharges(k *kit) contender {
	var scopes ownScopes
	return contender{op: func(ctx context.Context, client int) error {
		return k.charge(ctx, unit(scopes.next(client)))
	}}
}

// deliveries are numbers of events of each client: one in ten was there before, in another batch
// mostly.
type deliveries [batchClients]int

func (d *deliveries) next(client int) (id, scope string) {
	d[client]++
	n := d[client]
	if n%10 == 0 && n > 1000 {
		n -= 705 // which is no repetition itself
	}
	return fmt.Sprintf("event/%d/%012d", client, n), scopeName(client*1000 + n%1000)
}

// ingestOf counts n events in one call.
func ingestOf(n int) func(*kit) contender {
	return func(k *kit) contender {
		var source deliveries
		return contender{op: func(ctx context.Context, client int) error {
			return k.ingest(ctx, several(n, func() budget.UsageEvent {
				id, scope := source.next(client)
				return budget.UsageEvent{ID: id, Charge: unit(scope)}
			}))
		}}
	}
}

// ingestSingles counts an event by a command with its id and a charge.
func ingestSingles(k *kit) contender {
	var source deliveries
	return contender{op: func(ctx context.Context, client int) error {
		id, scope := source.next(client)
		_, err := metered.Do[any](ctx, k.client, metered.Command{ID: id, Charges: []budget.Charge{unit(scope)}}, nil)
		return err
	}}
}

// perCall is a's charges over b's ops in the same time. Each op of a makes n times as many.
func perCall(out outcome, a, b string, n int) samples {
	s := out.ratio(a, b)
	for i := range s.values {
		s.values[i] *= float64(n)
	}
	s.note = fmt.Sprintf("%s %s/s, %s %s/s", a, number(float64(n)*median(out.rates[a])), b, number(median(out.rates[b])))
	return s
}

// batches measures all sizes in one comparison, from which several figures are read.
func (b *bench) batches(ctx context.Context) (outcome, error) {
	return share(b, "batches", func() (outcome, error) {
		return b.compare(ctx, b.concurrent(batchClients), options{}, oneOf(1000),
			entry{"single", singleCharges}, entry{"each 64", batchOf(64)}, entry{"each 512", batchOf(512)})
	})
}

func batchFigure(n int, g goal) figure {
	return figure{fmt.Sprintf("batch_%d_vs_single", n), "times the rate", g, fmt.Sprintf("charges/s by ChargeEach of %d a call against single charges, 8 clients, scopes apart", n),
		func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.batches(ctx)
			return perCall(out, fmt.Sprint("each ", n), "single", n), err
		},
	}
}

var batchFigures = []figure{
	batchFigure(64, atLeast(10)), batchFigure(512, atLeast(14)),
	{"ingest_vs_single", "times the rate", atLeast(15), "events/s by Ingest of 512 a call, one in ten delivered twice, against commands with an id and a charge, 8 clients",
		func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.compare(ctx, b.concurrent(batchClients), options{}, oneOf(1000),
				entry{"ingest", ingestOf(512)}, entry{"command", ingestSingles})
			return perCall(out, "ingest", "command", 512), err
		},
	},
	{"batch_over_admission", "units", goal{"=", 0}, "units beyond the limit in any window, and events counted twice, recomputed from the rows after batches, events and singles on 20 scopes",
		on(options{conns: 12}, oneOf(20), batchOverAdmission)},
}

// batchOverAdmission lets batches, events, a Batcher and single charges meet at tight limits.
func batchOverAdmission(ctx context.Context, b *bench, k *kit) (samples, error) {
	batcher, err := budget.NewBatcher(k.Pool, k.client.Budget, budget.BatcherConfig{})
	if err != nil {
		return samples{}, err
	}
	tight := []budget.Limit{budget.PerWindow(100, 200*time.Millisecond), budget.Lifetime(5000)}
	charge := func() budget.Charge { return budget.Charge{Scope: k.scope(), Amount: 1, Limits: tight} }
	var id atomic.Int64
	op := func(ctx context.Context, client int) (err error) {
		switch client % 4 {
		case 0:
			err = k.chargeEach(ctx, several(64, charge))
		case 1:
			err = k.ingest(ctx, several(64, func() budget.UsageEvent {
				n := id.Add(1) / 2 // everything twice, and another client's too
				return budget.UsageEvent{ID: fmt.Sprint(n), Charge: budget.Charge{Scope: scopeName(int(n % 20)), Amount: 1, Limits: tight}}
			}))
		case 2:
			_, err = batcher.Charge(ctx, charge())
		default:
			err = k.charge(ctx, charge())
		}
		if errors.Is(err, budget.ErrExceeded) || errors.Is(err, budget.ErrSerialization) {
			return nil
		}
		return err
	}
	if _, _, err := drive(ctx, op, 16, time.Duration(b.pick(5000, 1000))*time.Millisecond, 0); err != nil {
		return samples{}, err
	}
	var entries, over, twice int64
	err = k.QueryRow(ctx, `
		select count(*), coalesce(max(greatest(w.used - 100, w.spent - 5000, 0)), 0), count(operation) - count(distinct operation)
		from (select l.operation, l.spent, sum(l.amount) over (partition by l.scope order by l.at
		          range between interval '0.199999 s' preceding and current row) as used from metered.ledger l) w`).Scan(&entries, &over, &twice)
	return samples{values: []float64{float64(over + twice)}, note: fmt.Sprintf("%d entries", entries)}, err
}

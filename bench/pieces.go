package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

var pieceFigures = []figure{
	rates("token_consume_vs_update", atLeast(0.9), "consuming single-use tokens against a bare UPDATE by key of the same rows, 8 clients",
		hotScope, entry{"consume", tokenConsume}, entry{"update", tokenUpdate}),
	rates("enqueue_keyed_vs_river", atLeast(0.85), "enqueueing with a key against River's InsertTx alone, 8 clients",
		hotScope, entry{"keyed", enqueue(true)}, entry{"river", riverInsert}, entry{"keyless", enqueue(false)}),
	{"bytes_per_charge", "bytes", atMost(220), "heap and index bytes per ledger entry, scopes of 24 bytes, 1,000 of them charged in random order",
		on(options{}, oneOf(1000), bytesPerCharge)},
	{"purge_rows_per_s_vs_delete", "times the rate", atLeast(0.8), "entries purged a second against a bare batched DELETE by key of as many rows",
		on(options{conns: 2}, nil, purgeRate)},
	{"refusal_flood_connections", "connections", atMost(floodPool), fmt.Sprintf("connections that a pool of %d opened during 10,000 refused commands, 32 clients", floodPool),
		on(options{conns: floodPool}, oneOf(1000), refusalFlood)},
}

func tokenConsume(k *kit) contender {
	return k.spendingToken(func(ctx context.Context, tx pgx.Tx, token tokens.Minted) error {
		_, err := k.client.Tokens.Consume(ctx, tx, "work", "bench", token.Token.Reveal())
		return err
	})
}

func tokenUpdate(k *kit) contender {
	return k.spendingToken(func(ctx context.Context, tx pgx.Tx, token tokens.Minted) error {
		_, err := tx.Exec(ctx, floorTokenSQL, token.Digest[:])
		return err
	})
}

// riverInsert is River alone, without the library's plugin.
func riverInsert(k *kit) contender {
	failed := k.setUp(&river.Config{})
	return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		if failed != nil {
			return failed
		}
		_, err := k.queue.InsertTx(ctx, tx, work{N: 1}, nil)
		return err
	})
}

func enqueue(keyed bool) func(*kit) contender {
	return func(k *kit) contender {
		return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
			var opts *jobs.Options
			if keyed {
				opts = &jobs.Options{Key: metered.NewID()}
			}
			_, err := k.client.Jobs.Enqueue(ctx, tx, work{N: 1}, opts)
			return err
		})
	}
}

// bytesPerCharge charges many times in a transaction.
func bytesPerCharge(ctx context.Context, b *bench, k *kit) (samples, error) {
	const perTx = 200
	charges := b.pick(60_000, 6_000)
	many := k.inTx(func(ctx context.Context, tx pgx.Tx) (err error) {
		for n := 0; n < perTx && err == nil; n++ {
			_, err = k.client.Budget.Charge(ctx, tx, unit(k.scope()))
		}
		return err
	})
	if _, _, err := drive(ctx, many.op, 1, time.Hour, charges/perTx); err != nil {
		return samples{}, err
	}
	var rows, heap, indexes, row float64
	err := k.QueryRow(ctx, `
select count(*)::float8, pg_table_size('metered.ledger')::float8, avg(pg_column_size(l.*))::float8,
    (select sum(pg_relation_size(indexrelid)) from pg_index where indrelid = 'metered.ledger'::regclass)::float8
from metered.ledger l`).Scan(&rows, &heap, &row, &indexes)
	if err != nil || int(rows) != charges {
		return samples{}, fmt.Errorf("%v entries after %d charges: %w", rows, charges, err)
	}
	note := fmt.Sprintf("%.0f in the heap, of them %.0f the row with its header; %.0f in the indexes; %.0f entries", heap/rows, row, indexes/rows, rows)
	return samples{values: []float64{(heap + indexes) / rows}, note: note}, nil
}

const deleteSQL = `delete from metered.ledger where scope = $1 and seq > $2 and seq <= $3`

// purgeRate empties two chains of one table in each round, one by each.
func purgeRate(ctx context.Context, b *bench, k *kit) (samples, error) {
	const batch = 5000
	entries := b.pick(100_000, 20_000)
	load := func(ctx context.Context, _ int) error {
		if _, err := k.Exec(ctx, "vacuum metered.ledger"); err != nil {
			return err
		}
		_, err := k.Exec(ctx, loadChainSQL, "chain", entries, 2*time.Hour)
		return err
	}
	purge := k.does("purge", func(ctx context.Context) error {
		report, err := k.client.Budget.Purge(ctx, k.Pool, budget.PurgeOptions{OlderThan: time.Hour, Scope: "chain", Batch: batch})
		if err == nil && report.Entries < int64(entries)-32 {
			err = fmt.Errorf("purged %d of %d", report.Entries, entries)
		}
		return errors.Join(err, k.clear(ctx))
	})
	bare := k.does("delete", func(ctx context.Context) error {
		for from := 0; from < entries; from += batch {
			if _, err := k.Exec(ctx, deleteSQL, "chain", from, from+batch); err != nil {
				return err
			}
		}
		return k.clear(ctx)
	})
	purge.stock, bare.stock = load, load
	out, err := comparison{contenders: []contender{purge, bare}, clients: 1, count: 1, rounds: b.pick(7, 3)}.run(ctx, b)
	s := out.ratio("purge", "delete")
	s.note = fmt.Sprintf("%s entries/s, delete %s/s, in batches of %d; an op below is all %d",
		number(float64(entries)*median(out.rates["purge"])), number(float64(entries)*median(out.rates["delete"])), batch, entries)
	return s, err
}

// clear deletes the rest of the chain, a few rows at most.
func (k *kit) clear(ctx context.Context) error {
	_, err := k.Exec(ctx, `delete from metered.ledger where scope = 'chain' and seq in (
		select seq from metered.ledger where scope = 'chain' order by seq limit 100)`)
	return err
}

const floodPool = 8

// refusalFlood refuses every other command by the first look, and the rest in the
// flush of its COMMIT: their charge is one that the function adds.
func refusalFlood(ctx context.Context, b *bench, k *kit) (samples, error) {
	none := []budget.Limit{{Max: 0, Window: time.Hour}}
	var n atomic.Int64
	began := k.Stat().NewConnsCount()
	op := func(ctx context.Context, _ int) error {
		charge := budget.Charge{Scope: k.scope(), Amount: 1, Limits: none}
		cmd := metered.Command{ID: metered.NewID(), Input: 1}
		late := n.Add(1)%2 == 0
		if !late {
			cmd.Charges = []budget.Charge{charge}
		}
		_, err := metered.Do(ctx, k.client, cmd, func(ctx context.Context, tx *metered.Tx) (int, error) {
			if late {
				return 0, tx.Charge(charge)
			}
			return 0, nil
		})
		if !errors.Is(err, budget.ErrExceeded) {
			return fmt.Errorf("not refused: %w", err)
		}
		return nil
	}
	refusals := b.pick(10_000, 2_000)
	count, seconds, err := drive(ctx, op, 32, time.Hour, refusals)
	if err != nil {
		return samples{}, err
	}
	return samples{
		values: []float64{float64(k.Stat().NewConnsCount() - began)},
		note:   fmt.Sprintf("%d refusals in %.1f s, half of them in the flush of COMMIT", count, seconds),
	}, nil
}

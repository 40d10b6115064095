package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// window is long enough for all entries that a figure loads.
const window = 1000 * time.Hour

var roomy = []budget.Limit{{Max: 1 << 50, Window: window}}

// charger charges a scope over and over on one connection, each time in a
// transaction of its own.
func charger(ctx context.Context, conn *pgxpool.Conn, l *budget.Ledger, scope string) func() error {
	return func() error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			_, err := l.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, Limits: roomy})
			return err
		})
	}
}

// loadChainSQL writes a chain of $2 charges of one unit, one a second, the last of
// them a minute ago: what charging them one by one would have left.
const loadChainSQL = `
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
select g, 1, clock_timestamp() - interval '1 minute' - ($2 - g) * interval '1 s', g, 0, 0, 0, 0, 'c', $1
from generate_series(1, $2::bigint) g`

// refundChainSQL refunds every ($2 / $3)th of the charges.
const refundChainSQL = `
select count(metered.refund($1, 1, g, 1, 1000, '', null, null))
from generate_series(1, $2::bigint, ($2 / $3)::bigint) g`

// chargeByWindow compares a charge on a scope with many entries in its window with
// one on a scope of 100, in turns, refunds in both windows.
func chargeByWindow(ctx context.Context, b *bench) (samples, error) {
	entries, refunds := b.pick(1_000_000, 200_000), b.pick(10_000, 2_000)
	pool, drop, err := b.database(ctx)
	if err != nil {
		return samples{}, err
	}
	defer drop()
	l, err := budget.New(budget.Config{})
	if err != nil {
		return samples{}, err
	}
	for _, scope := range []struct {
		name             string
		entries, refunds int
	}{{"big", entries, refunds}, {"small", 100, 1}} {
		if _, err := pool.Exec(ctx, loadChainSQL, scope.name, scope.entries); err != nil {
			return samples{}, err
		}
		if _, err := pool.Exec(ctx, refundChainSQL, scope.name, scope.entries, scope.refunds); err != nil {
			return samples{}, err
		}
	}
	if _, err := pool.Exec(ctx, "vacuum analyze metered.ledger, metered.refund_sum"); err != nil {
		return samples{}, err
	}
	s, err := alternate(ctx, pool, l, b.pick(41, 11))
	if err != nil {
		return samples{}, err
	}
	report, err := l.Verify(ctx, pool, budget.VerifyOptions{})
	if err == nil && !report.OK() {
		err = fmt.Errorf("the ledger does not verify: %v", report.Differences[0])
	}
	s.note = fmt.Sprintf("%d entries and %d refunds in the window", entries, refunds)
	return s, err
}

// alternate charges big and small in turns, 200 times a round.
func alternate(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, rounds int) (samples, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return samples{}, err
	}
	defer conn.Release()
	big, small := charger(ctx, conn, l, "big"), charger(ctx, conn, l, "small")
	var s samples
	for round := range rounds {
		// Who goes first changes, so that a trend of the machine cancels out.
		order := []func() error{big, small}
		if round%2 == 1 {
			order[0], order[1] = small, big
		}
		first, err := timed(200, order[0])
		if err != nil {
			return s, err
		}
		second, err := timed(200, order[1])
		if err != nil {
			return s, err
		}
		if round == 0 {
			continue // warming up
		}
		if round%2 == 1 {
			first, second = second, first
		}
		s.values = append(s.values, first/second)
	}
	return s, nil
}

// chargeColdStart charges one scope of a fresh database that nothing ever
// analyses, and compares the last thousand charges with the first.
func chargeColdStart(ctx context.Context, b *bench) (samples, error) {
	charges := b.pick(100_000, 20_000)
	var s samples
	for range b.pick(3, 1) {
		pool, drop, err := b.database(ctx,
			"alter table metered.ledger set (autovacuum_enabled = off)",
			"alter table metered.refund_sum set (autovacuum_enabled = off)")
		if err != nil {
			return s, err
		}
		ratio, err := firstAndLast(ctx, pool, charges)
		drop()
		if err != nil {
			return s, err
		}
		s.values = append(s.values, ratio)
	}
	s.note = fmt.Sprintf("%d charges", charges)
	return s, nil
}

func firstAndLast(ctx context.Context, pool *pgxpool.Pool, charges int) (float64, error) {
	l, err := budget.New(budget.Config{})
	if err != nil {
		return 0, err
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	charge := charger(ctx, conn, l, "scope")
	first, err := timed(1000, charge)
	if err != nil {
		return 0, err
	}
	if _, err := timed(charges-2000, charge); err != nil {
		return 0, err
	}
	last, err := timed(1000, charge)
	return last / first, err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

var dueFigures = []figure{
	{"charge_behind_due_holds", "times the cost", goal{}, "a charge that needs the room of 100,000 holds which are due and not swept, against one where none is due: the first one, each rolled back",
		on(options{}, nil, chargeBehind)},
	{"draw_after_idle_plan", "times the cost", goal{}, "a draw from a wallet with a daily plan that nobody has touched for 3 years, against one that was touched today: the first one, each rolled back",
		on(options{}, nil, drawAfterIdle)},
	{"sweep_rows_a_second", "rows/s", goal{}, "due holds of one scope that a sweep ends: their sum, and then batches of rows",
		on(options{}, nil, sweepSteps)},
}

// firstOf is how many times as long a call of one takes as one of the other, in turns. Each is
// rolled back, so it meets the same backlog each time.
func firstOf(ctx context.Context, b *bench, k *kit, one, other func(ctx context.Context, tx pgx.Tx) error) (s samples, err error) {
	var slow time.Duration
	timed := func(call func(ctx context.Context, tx pgx.Tx) error) (took time.Duration, err error) {
		tx, err := k.Pool.Begin(ctx)
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, tx.Rollback(ctx)) }()
		began := time.Now()
		err = call(ctx, tx)
		return time.Since(began), err
	}
	for n := range b.pick(21, 4) {
		long, err := timed(one)
		if err != nil {
			return s, err
		}
		short, err := timed(other)
		if err != nil {
			return s, err
		}
		if n > 0 { // the first ones fill caches
			s.values = append(s.values, float64(long)/float64(short))
			slow = max(slow, long)
		}
	}
	s.note = fmt.Sprintf("at most %.0f ms", slow.Seconds()*1000)
	return s, nil
}

func chargeBehind(ctx context.Context, b *bench, k *kit) (samples, error) {
	n := b.pick(100_000, 5_000)
	if err := k.loadHolds(ctx, "behind", n, time.Now().Add(-time.Hour)); err != nil {
		return samples{}, err
	}
	if _, err := k.Exec(ctx, "vacuum analyze"); err != nil {
		return samples{}, err
	}
	charge := func(scope string) func(ctx context.Context, tx pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := k.client.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(int64(n))}})
			return err
		}
	}
	return firstOf(ctx, b, k, charge("behind"), charge("none"))
}

func drawAfterIdle(ctx context.Context, b *bench, k *kit) (samples, error) {
	book, err := wallet.New(k.client.Budget, wallet.Config{})
	if err != nil {
		return samples{}, err
	}
	for name, days := range map[string]int{"idle": b.pick(3*365, 30), "today": 0} {
		_, err := k.Exec(ctx, fmt.Sprintf("create or replace function metered.clock() returns timestamptz language sql volatile as 'select pg_catalog.clock_timestamp() - interval ''%d days'''", days))
		if err != nil {
			return samples{}, err
		}
		err = pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: 1 << 20, Reference: "plan", Ends: wallet.EachPeriod(budget.Per(1, budget.Day, time.UTC, time.Time{}).Period)})
			return err
		})
		if err != nil {
			return samples{}, err
		}
	}
	for _, sql := range []string{"create or replace function metered.clock() returns timestamptz language sql volatile as 'select pg_catalog.clock_timestamp()'", "vacuum analyze"} {
		if _, err := k.Exec(ctx, sql); err != nil {
			return samples{}, err
		}
	}
	draw := func(name string) func(ctx context.Context, tx pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := k.client.Budget.Charge(ctx, tx, book.Charge(name, 1))
			return err
		}
	}
	return firstOf(ctx, b, k, draw("idle"), draw("today"))
}

func sweepSteps(ctx context.Context, b *bench, k *kit) (s samples, err error) {
	n := b.pick(2_000, 200)
	for round := range b.pick(5, 2) {
		if err := k.loadHolds(ctx, fmt.Sprint("holds/", round), n, time.Now().Add(-time.Hour)); err != nil {
			return s, err
		}
		began := time.Now()
		swept, err := k.client.Holds.Sweep(ctx, k.Pool, holds.SweepOptions{})
		if err != nil {
			return s, err
		}
		if swept.Expired != n {
			return s, fmt.Errorf("%d holds swept, want %d", swept.Expired, n)
		}
		s.values = append(s.values, float64(swept.Expired)/time.Since(began).Seconds())
		s.note = fmt.Sprintf("%d holds, in %d transactions", swept.Expired, swept.Batches)
	}
	return s, nil
}

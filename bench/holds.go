package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

var holdFigures = []figure{
	costs("hold_place_vs_charge", atMost(1.6), "placing a hold on one scope of 1,000, against charging it", oneOf(1000), entry{"place", place}, entry{"charge", chargeMetered}),
	costs("hold_place_capture_vs_charge", atMost(2.6), "placing a hold, and capturing it in another transaction, against one charge",
		oneOf(1000), entry{"place + capture", placeAndCapture}, entry{"charge", chargeMetered}),
	costs("session_vs_hold_and_command", atMost(1.2), "metered.Open and Settle, against placing a hold in a transaction and metered.Do that captures it",
		oneOf(1000), entry{"open + settle", session}, entry{"place + command", placeAndCommand}),
	{"hold_place_100k_open_vs_10", "times the cost", atMost(1.2), "placing on a scope with 100,000 open holds, none of them due, against one with 10 to 30",
		amongHolds(false, (*kit).placeOn)},
	{"hold_place_200k_ended_vs_10", "times the cost", atMost(1.2), "placing on a scope with 10 open holds and 200,000 ended ones that an old snapshot keeps alive, against one with 10 to 30 open",
		amongHolds(true, (*kit).placeOn)},
	{"hold_due_200k_ended_vs_10", "times the cost", atMost(1.2), "among 200,000 ended holds under an old snapshot, a usage and a refusal, which say when the first falls due, against among 10",
		amongHolds(true, (*kit).askOn)},
	{"hold_sweep_vs_release", "times the rate", atLeast(10), "holds/s that Sweep ends, against one connection that releases them one by one",
		on(options{conns: 2}, nil, sweepRate)},
}

func request(scope string, limits []budget.Limit) holds.Placement {
	return holds.Placement{Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: limits}}, TTL: time.Hour}
}

func (k *kit) place(ctx context.Context, r holds.Placement) (h holds.Hold, err error) {
	err = pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
		h, err = k.client.Holds.Place(ctx, tx, r)
		return err
	})
	return h, err
}

func place(k *kit) contender {
	return k.does("", func(ctx context.Context) error { return k.placeOn(ctx, k.scope()) })
}

func placeAndCapture(k *kit) contender {
	return contender{op: func(ctx context.Context, _ int) error {
		h, err := k.place(ctx, request(k.scope(), roomy))
		if err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			_, err := k.client.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, All: true})
			return err
		})
	}}
}

func session(k *kit) contender {
	return contender{op: func(ctx context.Context, _ int) error {
		s, err := metered.Open[int](ctx, k.client, metered.Reservation{ID: metered.NewID(), Lines: request(k.scope(), roomy).Lines})
		if err != nil {
			return err
		}
		defer s.Close()
		_, err = s.Settle(ctx, metered.Cost{All: true}, nil)
		return err
	}}
}

func placeAndCommand(k *kit) contender {
	return contender{op: func(ctx context.Context, _ int) error {
		h, err := k.place(ctx, request(k.scope(), roomy))
		if err != nil {
			return err
		}
		_, err = metered.Do(ctx, k.client, metered.Command{ID: metered.NewID(), Input: h.ID}, func(ctx context.Context, tx *metered.Tx) (int, error) {
			return 0, tx.Capture(holds.Capture{IDs: []string{h.ID}, All: true})
		})
		return err
	}}
}

// loadHoldsSQL places $2 holds of a unit on scope $1, of the key $3, due one a millisecond from $4
// on, with the same rows as single placements.
const loadHoldsSQL = `
with placed as (
    insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
    select clock_timestamp(), $4::timestamptz + g * interval '1 ms', $4::timestamptz + g * interval '1 ms', clock_timestamp() + interval '1 day',
        1, 'h', '', 'load-' || $1 || '-' || g, '', '', array[$3::bigint]
    from generate_series(1, $2::int) g returning no, due, placed_at),
lines as (
    insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq) select p.no, $3, 1, 1, p.due, $1, 1 from placed p),
events as (
    insert into metered.hold_events (hold, at, deadline, version, kind) select p.no, p.placed_at, p.due, 1, 'h' from placed p)
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due)
select g, 1, clock_timestamp(), 0, 0, 0, g, 0, 'h', $1, $4::timestamptz + interval '1 ms' from generate_series(1, $2::int) g`

// endHoldsSQL releases all open holds of a scope except the $2 that fall due last. next_due stays
// as it was, and the ended ones lie after it.
const endHoldsSQL = `
with gone as (select l.hold from metered.hold_lines l where l.scope = $1 order by l.due desc offset $2),
ended as (update metered.holds h set state = 'r', ended_at = clock_timestamp(), version = 2, pending = false
    where h.no in (select o.hold from gone o)),
freed as (update metered.hold_lines l set open = 0 where l.hold in (select o.hold from gone o))
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due)
select l.seq + 1, l.held - $2, clock_timestamp(), 0, 0, 0, $2, 0, 'l', $1, l.next_due
from metered.ledger l where l.scope = $1 order by l.seq desc limit 1`

func (k *kit) loadHolds(ctx context.Context, scope string, n int, due time.Time) error {
	_, err := k.Exec(ctx, loadHoldsSQL, scope, n, k.client.Budget.LockKey(scope), due)
	return err
}

// placeOn places a hold on that scope.
func (k *kit) placeOn(ctx context.Context, scope string) error {
	_, err := k.place(ctx, request(scope, roomy))
	return err
}

// askOn asks for that scope's usage and tries to place more than there is: both must say when the
// first hold falls due.
func (k *kit) askOn(ctx context.Context, scope string) error {
	usage, err := k.client.Budget.Usage(ctx, k.Pool, budget.Query{Scope: scope})
	if err != nil {
		return err
	}
	_, err = k.place(ctx, request(scope, []budget.Limit{budget.Lifetime(1)}))
	var exceeded *budget.ExceededError
	if !errors.As(err, &exceeded) {
		return fmt.Errorf("not refused: %w", err)
	}
	if min(usage[0].HoldDue, exceeded.Refusals[0].HoldDue) <= 0 {
		return errors.New("no hold falls due")
	}
	return nil
}

// amongHolds compares a call on a scope with many holds and one on a scope with ten, a fresh one in
// each turn. With ended, all of the many but ten were released, the last 500 one by one, as in
// production. An open snapshot is older than that, so that nothing can clean up after them.
func amongHolds(ended bool, call func(k *kit, ctx context.Context, scope string) error) func(context.Context, *bench) (samples, error) {
	return on(options{conns: 4}, nil, func(ctx context.Context, b *bench, k *kit) (samples, error) {
		many := b.pick(100_000, 10_000)
		if ended {
			many *= 2
		}
		later := time.Now().Add(30 * time.Minute)
		b.logf("  loading %d holds", many)
		if err := k.loadHolds(ctx, "many", many, later); err != nil {
			return samples{}, err
		}
		for turn := range b.sequential().rounds + 1 {
			if err := k.loadHolds(ctx, fmt.Sprint("ten-", turn), 10, later); err != nil {
				return samples{}, err
			}
		}
		if _, err := k.Exec(ctx, "vacuum analyze"); err != nil {
			return samples{}, err
		}
		if ended {
			old, err := pgx.Connect(ctx, k.url)
			if err != nil {
				return samples{}, err
			}
			defer func() { _ = old.Close(context.WithoutCancel(ctx)) }()
			if _, err := old.Exec(ctx, "begin isolation level repeatable read; select 1 from metered.holds limit 1"); err != nil {
				return samples{}, err
			}
			const few, rest = 10, 500
			if _, err := k.Exec(ctx, endHoldsSQL, "many", few+rest); err != nil {
				return samples{}, err
			}
			for i := many - few - rest; i < many-few; i++ {
				if err := k.release(ctx, fmt.Sprint("load-many-", i+1)); err != nil {
					return samples{}, err
				}
			}
		}
		calls := 0
		amongMany := k.does(fmt.Sprintf("among %d", many), func(ctx context.Context) error { return call(k, ctx, "many") })
		amongTen := k.does("among 10", func(ctx context.Context) error {
			calls++
			return call(k, ctx, fmt.Sprint("ten-", (calls-1)/shortTurn))
		})
		return b.cost(ctx, amongMany, amongTen)
	})
}

// sweepRate ends holds over ten scopes, some seconds' worth of a busy service. Sweep ends them in
// one op, and release a tenth of them.
func sweepRate(ctx context.Context, b *bench, k *kit) (samples, error) {
	n := b.pick(5000, 1000)
	rounds := 0
	load := func(each int, due time.Duration) func(context.Context, int) error {
		return func(ctx context.Context, _ int) error {
			rounds++
			for i := range 10 {
				if err := k.loadHolds(ctx, fmt.Sprintf("%d/%d", rounds, i), each, time.Now().Add(due)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	sweep := k.does("sweep", func(ctx context.Context) error {
		report, err := k.client.Holds.Sweep(ctx, k.Pool, holds.SweepOptions{})
		if err != nil || report.Expired != n {
			err = errors.Join(err, fmt.Errorf("%d of %d swept", report.Expired, n))
		}
		return err
	})
	release := k.does("release", func(ctx context.Context) error {
		for i := range n / 10 {
			if err := k.release(ctx, fmt.Sprintf("load-%d/%d-%d", rounds, i%10, i/10+1)); err != nil {
				return err
			}
		}
		return nil
	})
	sweep.stock, release.stock = load(n/10, -time.Hour), load(n/100, time.Hour)
	out, err := comparison{contenders: []contender{sweep, release}, clients: 1, count: 1, rounds: b.pick(5, 2)}.run(ctx, b)
	s := perCall(out, "sweep", "release", 10)
	s.note += fmt.Sprintf(" of %d holds", n/10)
	return s, err
}

func (k *kit) release(ctx context.Context, id string) error {
	return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
		_, err := k.client.Holds.Release(ctx, tx, holds.Release{IDs: []string{id}})
		return err
	})
}

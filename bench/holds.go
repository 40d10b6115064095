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
	costs("hold_place_vs_charge", atMost(1.6), "placing a hold on one scope of 1,000, against charging it",
		oneOf(1000), entry{"place", place}, entry{"charge", chargeMetered}),
	costs("hold_place_capture_vs_charge", atMost(2.6), "placing a hold, and capturing it in another transaction, against one charge",
		oneOf(1000), entry{"place + capture", placeAndCapture}, entry{"charge", chargeMetered}),
	costs("session_vs_hold_and_command", atMost(1.2), "metered.Open and Settle, against placing a hold in a transaction and metered.Do that captures it",
		oneOf(1000), entry{"open + settle", session}, entry{"place + command", placeAndCommand}),
	{
		name: "hold_place_100k_open_vs_10", unit: "times the cost", goal: atMost(1.2),
		meaning: "placing on a scope with 100,000 open holds, none of them due, against one with 10 to 30",
		measure: amongHolds(false, (*kit).placeOn),
	},
	{
		name: "hold_place_200k_ended_vs_10", unit: "times the cost", goal: atMost(1.2),
		meaning: "placing on a scope with 10 open holds and 200,000 ended ones that an old snapshot keeps alive, against one with 10 to 30 open",
		measure: amongHolds(true, (*kit).placeOn),
	},
	{
		name: "hold_due_200k_ended_vs_10", unit: "times the cost", goal: atMost(1.2),
		meaning: "among 200,000 ended holds under an old snapshot, a usage and a refusal, which say when the first falls due, against among 10",
		measure: amongHolds(true, (*kit).askOn),
	},
	{
		name: "hold_sweep_vs_release", unit: "times the rate", goal: atLeast(10),
		meaning: "holds/s that Sweep ends, against one connection that releases them one by one",
		measure: on(options{conns: 2}, nil, sweepRate),
	},
}

func (k *kit) request() holds.Request {
	return holds.Request{Lines: []holds.Line{{Scope: k.scope(), Amount: 1, Limits: roomy}}, TTL: time.Hour}
}

func (k *kit) place(ctx context.Context, r holds.Request) (h holds.Hold, err error) {
	err = pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
		h, err = k.client.Holds.Place(ctx, tx, r)
		return err
	})
	return h, err
}

func place(k *kit) contender {
	return contender{op: func(ctx context.Context, _ int) error {
		_, err := k.place(ctx, k.request())
		return err
	}}
}

func placeAndCapture(k *kit) contender {
	return contender{op: func(ctx context.Context, _ int) error {
		h, err := k.place(ctx, k.request())
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
		s, err := metered.Open[int](ctx, k.client, metered.Reservation{ID: metered.NewID(), Lines: k.request().Lines})
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
		h, err := k.place(ctx, k.request())
		if err != nil {
			return err
		}
		_, err = metered.Do(ctx, k.client, metered.Command{ID: metered.NewID(), Input: h.ID}, func(ctx context.Context, tx *metered.Tx) (int, error) {
			return 0, tx.Capture(holds.Capture{IDs: []string{h.ID}, All: true})
		})
		return err
	}}
}

// loadHoldsSQL places $2 holds of a unit on scope $1, of the key $3, due one a millisecond from $4 on, with the same
// rows as single placements.
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

// endHoldsSQL releases all open holds of a scope except the $2 that fall due last. next_due stays as it was, and the
// ended ones lie behind it.
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
	_, err := k.place(ctx, holds.Request{Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: roomy}}, TTL: time.Hour})
	return err
}

// askOn asks for that scope's usage and tries to place more than there is: both must say
// when the first hold falls due.
func (k *kit) askOn(ctx context.Context, scope string) error {
	usage, err := k.client.Budget.Usage(ctx, k.Pool, budget.Query{Scope: scope})
	if err != nil {
		return err
	}
	none := budget.Lifetime(1)
	_, err = k.place(ctx, holds.Request{Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: []budget.Limit{none}}}, TTL: time.Hour})
	var exceeded *budget.ExceededError
	if !errors.As(err, &exceeded) {
		return fmt.Errorf("not refused: %w", err)
	}
	if min(usage[0].HoldDue, exceeded.Refusals[0].HoldDue) <= 0 {
		return errors.New("no hold falls due")
	}
	return nil
}

// amongHolds compares a call on a scope with many holds and one on a scope with ten, a fresh one in each turn. With
// ended, all of the many but ten were released, the last 500 one by one, as in production. An open snapshot is older
// than that, so that nothing can clean up after them.
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
		turns := b.sequential()
		for turn := range turns.rounds + 1 {
			if err := k.loadHolds(ctx, fmt.Sprint("ten-", turn), 10, later); err != nil {
				return samples{}, err
			}
		}
		if _, err := k.Exec(ctx, "vacuum analyze"); err != nil {
			return samples{}, err
		}
		if ended {
			old, err := pgx.ConnectConfig(ctx, k.direct())
			if err != nil {
				return samples{}, err
			}
			defer func() { _ = old.Close(context.WithoutCancel(ctx)) }()
			for _, sql := range []string{"begin isolation level repeatable read", "select 1 from metered.holds limit 1"} {
				if _, err := old.Exec(ctx, sql); err != nil {
					return samples{}, err
				}
			}
			const few, rest = 10, 500
			if _, err := k.Exec(ctx, endHoldsSQL, "many", few+rest); err != nil {
				return samples{}, err
			}
			ids := make([]string, 0, rest)
			for i := many - few - rest; i < many-few; i++ {
				ids = append(ids, fmt.Sprint("load-many-", i+1))
			}
			if err := k.releaseAll(ctx, ids); err != nil {
				return samples{}, err
			}
		}
		charging := func(name string, scope func(call int) string) contender {
			calls := 0
			return contender{name: name, site: k.site, op: func(ctx context.Context, _ int) error {
				calls++
				return call(k, ctx, scope(calls-1))
			}}
		}
		a := charging(fmt.Sprintf("among %d", many), func(int) string { return "many" })
		z := charging("among 10", func(call int) string { return fmt.Sprint("ten-", call/turns.count) })
		turns.contenders = []contender{a, z}
		out, err := turns.run(ctx, b)
		return out.cost(a.name, z.name), err
	})
}

// sweepRate ends holds over ten scopes, some seconds' worth of a busy service.
func sweepRate(ctx context.Context, b *bench, k *kit) (s samples, err error) {
	n := b.pick(5000, 1000)
	var sweeps, releases []float64
	var watches [2]*watch
	for i, name := range []string{"sweep", "release"} {
		if watches[i], err = newWatch(ctx, name, k.site); err != nil {
			return s, err
		}
		defer watches[i].close()
	}
	for round := range b.pick(5, 2) {
		ids := make([]string, 0, n/10)
		for i := range 10 {
			due, live := fmt.Sprintf("due/%d/%d", round, i), fmt.Sprintf("live/%d/%d", round, i)
			if err := k.loadHolds(ctx, due, n/10, time.Now().Add(-time.Hour)); err != nil {
				return s, err
			}
			if err := k.loadHolds(ctx, live, n/100, time.Now().Add(time.Hour)); err != nil {
				return s, err
			}
			for j := range n / 100 {
				ids = append(ids, fmt.Sprintf("load-%s-%d", live, j+1))
			}
		}
		stop := watches[0].start(ctx, true)
		took, err := timed(1, func() error {
			report, err := k.client.Holds.Sweep(ctx, k.Pool, holds.SweepOptions{})
			if err != nil || report.Expired != n {
				err = errors.Join(err, fmt.Errorf("%d of %d swept", report.Expired, n))
			}
			return err
		})
		if err := errors.Join(err, stop(n)); err != nil {
			return s, err
		}
		sweeps = append(sweeps, float64(n)/took)
		stop = watches[1].start(ctx, true)
		took, err = timed(1, func() error { return k.releaseAll(ctx, ids) })
		if err := errors.Join(err, stop(len(ids))); err != nil {
			return s, err
		}
		releases = append(releases, float64(len(ids))/took)
	}
	s.values = ratios(sweeps, releases)
	s.where = []profile{watches[0].profile(sweeps), watches[1].profile(releases)}
	s.note = fmt.Sprintf("swept %s/s, released %s/s", number(median(sweeps)), number(median(releases)))
	return s, nil
}

// releaseAll releases holds one by one.
func (k *kit) releaseAll(ctx context.Context, ids []string) error {
	for _, id := range ids {
		err := pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			_, err := k.client.Holds.Release(ctx, tx, holds.Release{IDs: []string{id}})
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgmetered/metered/budget"
)

var windowFigures = []figure{
	{"charge_window_1e6_vs_1e2", "times the cost", atMost(1.15), "a charge with a million entries and 10,000 refunds in its window, against one with 100 to 120",
		func(ctx context.Context, b *bench) (samples, error) { return chargeByWindow(ctx, b, roomy) }},
	{"charge_period_1e6_vs_1e2", "times the cost", atMost(1.15), "the same in a calendar year of a time zone, in place of a window",
		func(ctx context.Context, b *bench) (samples, error) {
			berlin, err := time.LoadLocation("Europe/Berlin")
			if err != nil {
				return samples{}, err
			}
			return chargeByWindow(ctx, b, []budget.Limit{budget.Per(roomy[0].Max, budget.Year, berlin, time.Now().AddDate(0, 0, -300))})
		},
	},
	{"refusal_vs_charge", "times the cost", atMost(1.0), "a refused charge, retry-after included, against an allowed one, with a million entries in the window", refusalCost},
	{"series_31_1e6_vs_1e2", "times the cost", atMost(2.5), "the usage of a range in 31 buckets, of a million entries with 10,000 refunds, against one of 100", seriesByEntries},
	{"charge_scopes_1e6_vs_1e3", "times the cost", atMost(1.3), "a charge with a million scopes in the table, against one with a thousand", chargeByScopes},
	{"charge_cold_start", "times the cost", atMost(1.3), "the last 1,000 of 100,000 charges on a database that was never analysed, against the first 1,000", chargeColdStart},
}

// loadChainSQL writes a chain of $2 charges of one unit, one a second, the last of them $3 ago,
// with the same rows as single charges.
const loadChainSQL = `
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, others)
select g, 1, clock_timestamp() - $3::interval - ($2 - g) * interval '1 s', g, 0, 0, 0, 0, 'c', $1, null
from generate_series(1, $2::bigint) g`

// refundChainSQL refunds every hundredth of the charges.
const refundChainSQL = `
select count(metered.refund($1, null, g, 1, 1000, null, false))
from generate_series(1, $2::bigint, 100) g`

// chains is a kit with a long chain and short ones of a hundred entries. Each turn takes another
// short one, before it has grown much.
type chains struct {
	*kit
	long   int
	copies map[int]int // by size
}

func chainName(size, i int) string { return fmt.Sprintf("chain/%08d/%09d", size, i) }

// restoreChainsSQL deletes entries made since the chains were loaded. A chain has a refund of every
// hundredth charge.
const restoreChainsSQL = `
delete from metered.ledger where scope like 'chain/%' and seq > split_part(scope, '/', 2)::bigint * 101 / 100`

// chains are shared by the figures of windows. Each figure finds them as they were loaded.
func (b *bench) chains(ctx context.Context) (*chains, error) {
	c, err := share(b, "chains", func() (*chains, error) { return b.loadChains(ctx) })
	if err != nil {
		return nil, err
	}
	for _, sql := range []string{restoreChainsSQL, "vacuum analyze metered.ledger, metered.refund_sum"} {
		if _, err := c.Exec(ctx, sql); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (b *bench) loadChains(ctx context.Context) (*chains, error) {
	k, err := b.kit(ctx, options{}, nil)
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, k.drop)
	c := &chains{kit: k, long: b.pick(1_000_000, 10_000), copies: map[int]int{}}
	for _, size := range []int{100, c.long} {
		c.copies[size] = max(1, 100*(b.sequential().rounds+1)/size) // of a hundred, one for each turn
		b.logf("  loading %d of %d entries", c.copies[size], size)
		for i := range c.copies[size] {
			if _, err := k.Exec(ctx, loadChainSQL, chainName(size, i), size, time.Minute); err != nil {
				return nil, err
			}
			if _, err := k.Exec(ctx, refundChainSQL, chainName(size, i), size); err != nil {
				return nil, err
			}
		}
	}
	return c, nil
}

// on is a contender that charges chains of a size, another one in each turn.
func (c *chains) on(size int, limits []budget.Limit) contender {
	n := 0
	return c.does(fmt.Sprintf("%d entries", size), func(ctx context.Context) error {
		n++
		return c.charge(ctx, budget.Charge{Scope: chainName(size, (n-1)/shortTurn%c.copies[size]), Amount: 1, Limits: limits})
	})
}

func chargeByWindow(ctx context.Context, b *bench, limits []budget.Limit) (samples, error) {
	c, err := b.chains(ctx)
	if err != nil {
		return samples{}, err
	}
	s, err := b.cost(ctx, c.on(c.long, limits), c.on(100, limits))
	return s, errors.Join(err, c.verified(ctx, chainName(c.long, 0)))
}

// seriesByEntries asks for a chain from its first entry to its last in 31 buckets, as for a month
// by day.
func seriesByEntries(ctx context.Context, b *bench) (samples, error) {
	c, err := b.chains(ctx)
	if err != nil {
		return samples{}, err
	}
	var series []contender
	for _, size := range []int{c.long, 100} {
		scope := chainName(size, 0)
		var from, to time.Time
		err := c.QueryRow(ctx, "select min(at), max(at) from metered.ledger where scope = $1 and seq in (1, $2)", scope, size).Scan(&from, &to)
		if err != nil {
			return samples{}, err
		}
		to = to.Add(time.Microsecond)
		bucket := budget.Unit(((to.Sub(from)/31 + time.Microsecond).Truncate(time.Microsecond)).String())
		series = append(series, c.does(fmt.Sprintf("%d entries", size), func(ctx context.Context) error {
			ranges, err := c.client.Budget.Series(ctx, c.Pool, scope, from, to, bucket, nil)
			charged := int64(0)
			for _, u := range ranges {
				charged += u.Charged
			}
			if err == nil && (len(ranges) != 31 || charged != int64(size)) {
				err = fmt.Errorf("%d buckets, %d charged", len(ranges), charged)
			}
			return err
		}))
	}
	return b.cost(ctx, series[0], series[1])
}

// refusalCost needs in turn one entry, a thousand, and half of all to leave.
func refusalCost(ctx context.Context, b *bench) (samples, error) {
	c, err := b.chains(ctx)
	if err != nil {
		return samples{}, err
	}
	scope := chainName(c.long, 0)
	usage, err := c.client.Budget.Check(ctx, c.Pool, unit(scope))
	if err != nil {
		return samples{}, err
	}
	used := usage.Entries[0].Standings[0].Used - 1
	leave := []int64{1, 1000, used / 2}
	n := 0
	refused := c.does("refused", func(ctx context.Context) error {
		n++
		limit := budget.Limit{Max: used + 1 - leave[n%len(leave)], Window: window}
		err := c.charge(ctx, budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{limit}})
		var exceeded *budget.ExceededError
		if !errors.As(err, &exceeded) {
			return fmt.Errorf("not refused: %w", err)
		}
		if after := exceeded.Refusals[0].RetryAfter; after <= 0 || after == budget.Never {
			return fmt.Errorf("retry after %v", after)
		}
		return nil
	})
	allowed := c.on(c.long, roomy)
	allowed.name = "allowed"
	s, err := b.cost(ctx, refused, allowed)
	s.note += fmt.Sprintf("; %d entries; 1, 1000 or %d of them have to leave", c.long, used/2)
	return s, err
}

// loadScopesSQL writes one entry for each scope, in no order, as they would come.
const loadScopesSQL = `
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, others)
select 1, 1, clock_timestamp() - interval '1 minute', 1, 0, 0, 0, 0, 'c', 'scope/' || lpad(g::text, 18, '0'), null
from generate_series(0, $1::int - 1) g order by hashint8(g)`

// chargeByScopes charges scopes at random. It begins after a checkpoint, so that the
// first touch of each page puts the page into the WAL, as after any other.
func chargeByScopes(ctx context.Context, b *bench) (samples, error) {
	sizes := []int{b.pick(1_000_000, 50_000), 1000}
	c := b.sequential()
	for _, size := range sizes {
		k, err := b.kit(ctx, options{}, oneOf(size))
		if err != nil {
			return samples{}, err
		}
		defer k.drop()
		b.logf("  loading %d scopes", size)
		if _, err := k.Exec(ctx, loadScopesSQL, size); err != nil {
			return samples{}, err
		}
		for _, sql := range []string{"vacuum analyze metered.ledger", "checkpoint"} {
			if _, err := k.Exec(ctx, sql); err != nil {
				return samples{}, err
			}
		}
		con := chargeMetered(k)
		con.name, con.site = fmt.Sprintf("%d scopes", size), k.site
		c.contenders = append(c.contenders, con)
	}
	out, err := c.run(ctx, b)
	if err != nil {
		return samples{}, err
	}
	s := out.cost(c.contenders[0].name, c.contenders[1].name)
	s.note += fmt.Sprintf("; WAL a charge: %.0f and %.0f bytes, pages touched first after a checkpoint included",
		out.where[0].walBytes, out.where[1].walBytes)
	return s, nil
}

// chargeColdStart charges one scope of a fresh database that nothing ever analyses, and compares
// its last thousand charges with the first thousand of another one. The connection keeps the plans
// that it made while the table was empty.
func chargeColdStart(ctx context.Context, b *bench) (samples, error) {
	charges := b.pick(100_000, 3_000)
	never := options{conns: 1, setUp: `
alter table metered.ledger set (autovacuum_enabled = off);
alter table metered.refund_sum set (autovacuum_enabled = off)`}
	cons, drop, err := b.contenders(ctx, never, hotScope, entry{"the last", chargeMetered}, entry{"the first", chargeMetered})
	if err != nil {
		return samples{}, err
	}
	defer drop()
	b.logf("  charging %d times", charges-1000)
	for _, step := range []func() error{
		func() error { _, err := cons[0].site.Exec(ctx, "set synchronous_commit = off"); return err }, // not measured yet
		func() error { _, _, err := drive(ctx, cons[0].op, 1, time.Hour, charges-1000); return err },
		func() error { _, err := cons[0].site.Exec(ctx, "reset synchronous_commit"); return err },
	} {
		if err := step(); err != nil {
			return samples{}, err
		}
	}
	c := b.sequential(cons...)
	c.rounds = 1000/c.count - 1
	out, err := c.run(ctx, b)
	s := out.cost("the last", "the first")
	s.note += fmt.Sprintf("; %d charges", charges)
	return s, err
}

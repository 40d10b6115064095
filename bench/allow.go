package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/jackc/pgx/v5"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

var allowFigures = []figure{
	{"allow_ns_limiter", "ns", atMost(150), "a decision of Allow from memory, one goroutine, by a Limiter of the scope", on(options{}, nil, allowed(1, true))},
	{"allow_ns_by_name", "ns", atMost(300), "the same by the scope's name", on(options{}, nil, allowed(1, false))},
	{"allow_ns_8_goroutines", "ns", atMost(400), "the same, 8 goroutines on one scope: all of their time, by the number of decisions", on(options{}, nil, allowed(8, false))},
	{"allow_db_calls_per_million", "calls", atMost(200), "calls to the database for a million decisions at 200,000 a second: leases opened and settled, and direct charges",
		on(options{}, nil, allowCalls)},
	{"allow_vs_redis_rate", "times the rate", atLeast(50), "decisions/s over 1,000 scopes, 8 goroutines, against go-redis/redis_rate, where the last second may be lost",
		on(options{}, nil, allowAgainstRedis)},
	{"allow_vs_throttled", "times the rate", atLeast(1), "decisions/s over 1,000 scopes, 8 goroutines, against throttled on its store in memory, which nobody else sees",
		on(options{}, nil, allowAgainstThrottled)},
	{"lease_stranded", "% of the budget", atMost(2), "units that slices keep from others over the last tenth of a budget, on average, 4 processes",
		on(options{}, nil, stranded)},
	{"lease_over_admission", "units", goal{"=", 0}, "units beyond the limit in any sliding window of a second, recomputed from the rows; 4 processes, 8 clients, leases and direct charges",
		on(options{conns: 12}, nil, overAdmission)},
}

// decisions are made by one op. One of them alone takes less time than counting it.
const decisions = 1000

// allowed is the time of a decision on one scope.
func allowed(goroutines int, limiter bool) func(context.Context, *bench, *kit) (samples, error) {
	return func(ctx context.Context, b *bench, k *kit) (s samples, err error) {
		p, err := k.lease(leases.Rule{})
		if err != nil {
			return s, err
		}
		charge := unit(hotScope())
		decide := func() error { return p.Allow(ctx, charge) }
		if limiter {
			l, err := p.Limiter(charge)
			if err != nil {
				return s, err
			}
			decide = func() error { return l(ctx, 1) }
		}
		op := func(context.Context, int) error {
			for range decisions {
				if err := decide(); err != nil {
					return err
				}
			}
			return nil
		}
		c := comparison{contenders: []contender{{name: "allow", op: op}}, clients: goroutines, count: b.pick(1000, 200), rounds: b.rounds()}
		out, err := c.run(ctx, b)
		for _, rate := range out.rates["allow"] {
			s.values = append(s.values, 1e9/(rate*decisions))
		}
		return s, err
	}
}

// allowCalls counts by the rows that calls left: a lease is opened and settled, a direct charge is
// an entry.
func allowCalls(ctx context.Context, b *bench, k *kit) (samples, error) {
	p, err := k.lease(leases.Rule{})
	if err != nil {
		return samples{}, err
	}
	n := b.pick(3_000_000, 600_000)
	charge := unit(hotScope())
	began := time.Now()
	for i := range n {
		if err := p.Allow(ctx, charge); err != nil {
			return samples{}, err
		}
		if i%1000 == 999 { // 1,000 in 5 ms
			time.Sleep(time.Until(began.Add(time.Duration(i/1000) * 5 * time.Millisecond)))
		}
	}
	seconds := time.Since(began).Seconds()
	var calls float64
	err = k.QueryRow(ctx, `select 2 * (select count(*) from metered.leases)::float8 + (select count(*) from metered.ledger where kind = 'c')`).Scan(&calls)
	return samples{values: []float64{calls / float64(n) * 1e6}, note: fmt.Sprintf("%d decisions in %.1f s", n, seconds)}, err
}

// against compares Allow in turns with another limiter, 8 goroutines over 1,000 scopes. An op of
// the other one makes so many decisions.
func (k *kit) against(ctx context.Context, b *bench, name string, each int, other func(scope string) (refused bool, err error)) (samples, error) {
	p, err := k.lease(leases.Rule{MinSlice: 10_000, TTL: hotRule.TTL, Idle: hotRule.Idle})
	if err != nil {
		return samples{}, err
	}
	scopes := several(1000, inTurn(1000)) // made before they are measured
	over := func(name string, each int, decide func(scope string) error) contender {
		return contender{name: name, op: func(_ context.Context, _ int) error {
			from := rand.IntN(len(scopes))
			for i := range each {
				if err := decide(scopes[(from+i*7919)%len(scopes)]); err != nil {
					return err
				}
			}
			return nil
		}}
	}
	allow := over("allow", decisions, func(scope string) error { return p.Allow(ctx, unit(scope)) })
	others := over(name, each, func(scope string) error {
		refused, err := other(scope)
		if err == nil && refused {
			err = errors.New("refused")
		}
		return err
	})
	c := comparison{contenders: []contender{allow, others}, clients: 8, count: b.pick(2000, 400), rounds: b.rounds()}
	out, err := c.run(ctx, b)
	s := perCall(out, "allow", name, decisions/each)
	s.note += fmt.Sprintf(" of %d decisions", each)
	return s, err
}

func allowAgainstRedis(ctx context.Context, b *bench, k *kit) (samples, error) {
	r, err := startRedis(ctx)
	if err != nil {
		return samples{}, err
	}
	defer r.stop()
	rate := redis_rate.NewLimiter(r.client)
	limit := redis_rate.Limit{Rate: 1_000_000_000, Burst: 1_000_000_000, Period: time.Hour}
	return k.against(ctx, b, "redis_rate", 40, func(scope string) (bool, error) {
		res, err := rate.Allow(ctx, scope, limit)
		return err == nil && res.Allowed == 0, err
	})
}

func allowAgainstThrottled(ctx context.Context, b *bench, k *kit) (samples, error) {
	store, err := memstore.NewCtx(0)
	if err != nil {
		return samples{}, err
	}
	gcra, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerSec(1_000_000_000), MaxBurst: 1_000_000_000})
	if err != nil {
		return samples{}, err
	}
	return k.against(ctx, b, "throttled", decisions, func(scope string) (bool, error) {
		limited, _, err := gcra.RateLimitCtx(ctx, scope, 1)
		return limited, err
	})
}

// stranded lets 4 processes spend a budget to its end, and counts the units that they keep and do
// not use.
func stranded(ctx context.Context, b *bench, k *kit) (samples, error) {
	const processes, patience = 4, 2 * time.Minute
	whole := int64(b.pick(1_000_000, 200_000))
	charge := budget.Charge{Scope: hotScope(), Amount: 1, Limits: []budget.Limit{budget.Lifetime(whole)}}
	var pools [processes]*leases.Pool
	for i := range pools {
		var err error
		if pools[i], err = k.lease(leases.Rule{}); err != nil {
			return samples{}, err
		}
	}
	var allowed atomic.Int64
	spend := func(ctx context.Context, process int) error {
		if allowed.Load() == whole {
			return errOut
		}
		err := pools[process].Allow(ctx, charge)
		if errors.Is(err, budget.ErrExceeded) {
			time.Sleep(time.Millisecond)
			return nil
		}
		if err == nil && allowed.Add(1)%100 == 0 { // 25,000 a second each
			time.Sleep(4 * time.Millisecond)
		}
		return err
	}
	spent := make(chan error, 1)
	go func() {
		_, _, err := drive(ctx, spend, processes, patience, 0)
		if err == nil && allowed.Load() < whole {
			err = fmt.Errorf("%d of %d units were spent in %v", allowed.Load(), whole, patience)
		}
		spent <- err
	}()
	var sum, n, most float64
	for {
		select {
		case err := <-spent:
			return samples{values: []float64{sum / max(n, 1)}, note: fmt.Sprintf("at most %s %%, in %.0f samples; all %d units were spent in the end", number(most), n, whole)}, err
		case <-time.After(2 * time.Millisecond):
		}
		used := allowed.Load()
		u, err := k.client.Budget.Usage(ctx, k.Pool, budget.Query{Scope: hotScope()})
		if err != nil {
			return samples{}, err
		}
		if used > whole/10*9 {
			kept := max(0, float64(u[0].Spent+u[0].Leased-allowed.Load())) / float64(whole) * 100
			sum, n, most = sum+kept, n+1, max(most, kept)
		}
	}
}

// overAdmissionSQL is the largest total of any window. A lease's capture is counted by its spends.
const overAdmissionSQL = `
select coalesce(max(w.units), 0)::bigint from (
    select sum(a.amount) over (order by a.at range between interval '999999 microseconds' preceding and current row) as units
    from (select at, amount from metered.ledger where kind = 'c' union all select at, amount from metered.lease_spends) a) w`

func overAdmission(ctx context.Context, b *bench, k *kit) (samples, error) {
	const most = 1000
	charge := budget.Charge{Scope: hotScope(), Amount: 1, Limits: []budget.Limit{budget.PerWindow(most, time.Second)}}
	var pools [3]*leases.Pool // the fourth process charges directly
	for i := range pools {
		var err error
		if pools[i], err = k.lease(leases.Rule{Share: 8, Idle: 50 * time.Millisecond}); err != nil {
			return samples{}, err
		}
	}
	var refused atomic.Int64
	n, _, err := drive(ctx, func(ctx context.Context, client int) error {
		err := pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			if process := client % 4; process < len(pools) {
				_, err := pools[process].Charge(ctx, tx, charge)
				return err
			}
			_, err := k.client.Budget.Charge(ctx, tx, charge)
			return err
		})
		if errors.Is(err, budget.ErrExceeded) {
			refused.Add(1)
			return nil
		}
		return err
	}, 8, time.Duration(b.pick(10, 3))*time.Second, 0)
	if err != nil {
		return samples{}, err
	}
	var seen int64
	err = k.QueryRow(ctx, overAdmissionSQL).Scan(&seen)
	return samples{
		values: []float64{float64(max(0, seen-most))},
		note:   fmt.Sprintf("%d calls, %d of them refused; the fullest window had %d of %d", n, refused.Load(), seen, most),
	}, err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"sync"
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
	{"allow_ns_limiter", "ns", atMost(150), "a decision of Allow from memory, one goroutine, by a Limiter of the scope",
		on(options{conns: 4}, hotScope, allowed(1, true))},
	{"allow_ns_by_name", "ns", atMost(300), "the same by the scope's name",
		on(options{conns: 4}, hotScope, allowed(1, false))},
	{"allow_ns_8_goroutines", "ns", atMost(400), "the same, 8 goroutines on one scope: all of their time, by the number of decisions",
		on(options{conns: 4}, hotScope, allowed(8, false))},
	{"allow_db_calls_per_million", "calls", atMost(200), "calls to the database for a million decisions at 200,000 a second: leases opened and settled, and direct charges",
		on(options{conns: 4}, hotScope, allowCalls)},
	{"allow_vs_redis_rate", "times the rate", atLeast(50), "decisions/s over 1,000 scopes, 8 goroutines, against go-redis/redis_rate, " + lessDurable,
		on(options{conns: 8}, hotScope, allowAgainstRedis)},
	{"allow_vs_throttled", "times the rate", atLeast(1), "decisions/s over 1,000 scopes, 8 goroutines, against throttled on its store in memory, which nobody else sees",
		on(options{conns: 8}, hotScope, allowAgainstThrottled)},
	{"lease_stranded", "% of the budget", atMost(2), "units that slices keep from others over the last tenth of a budget, on average, 4 processes",
		on(options{conns: 8}, hotScope, stranded)},
	{"lease_over_admission", "units", goal{"=", 0}, "units beyond the limit in any sliding window of a second, recomputed from the rows; 4 processes, 8 clients, leases and direct charges",
		on(options{conns: 12}, hotScope, overAdmission)},
}

// deciding lets goroutines call op n times each, and returns the nanoseconds of a call and the allocations.
func deciding(goroutines, n int, op func(i int) error) (ns, allocs float64, err error) {
	var before, after runtime.MemStats
	var group sync.WaitGroup
	var failed atomic.Pointer[error]
	runtime.ReadMemStats(&before)
	began := time.Now()
	for g := range goroutines {
		group.Go(func() {
			for i := range n {
				if err := op(g*n + i); err != nil {
					first := err // apart: it would be allocated each time
					failed.Store(&first)
					return
				}
			}
		})
	}
	group.Wait()
	took := time.Since(began)
	runtime.ReadMemStats(&after)
	if e := failed.Load(); e != nil {
		return 0, 0, *e
	}
	calls := float64(goroutines * n)
	return float64(took.Nanoseconds()) / calls, float64(after.Mallocs-before.Mallocs) / calls, nil
}

// allowed is the time of a decision on one scope.
func allowed(goroutines int, limiter bool) func(context.Context, *bench, *kit) (samples, error) {
	return func(ctx context.Context, b *bench, k *kit) (s samples, err error) {
		p, err := k.lease(leases.Rule{})
		if err != nil {
			return s, err
		}
		charge := budget.Charge{Scope: hotScope(), Amount: 1, Limits: roomy}
		op := func(int) error { return p.Allow(ctx, charge) }
		if limiter {
			l, err := p.Limiter(charge)
			if err != nil {
				return s, err
			}
			op = func(int) error { return l.AllowN(ctx, 1) }
		}
		var most float64
		for round := range b.rounds() + 2 {
			ns, allocs, err := deciding(goroutines, b.pick(1_000_000, 200_000)/goroutines, op)
			if err != nil {
				return s, err
			}
			if round > 1 { // slices grow with the demand
				s.values, most = append(s.values, ns), max(most, allocs)
			}
		}
		s.note = fmt.Sprintf("%.4f allocations a decision, those of the slices in the background among them", most)
		return s, nil
	}
}

// allowCalls counts by the rows that calls left: a lease is opened and settled, a direct charge is an entry.
func allowCalls(ctx context.Context, b *bench, k *kit) (samples, error) {
	p, err := k.lease(leases.Rule{})
	if err != nil {
		return samples{}, err
	}
	n := b.pick(3_000_000, 600_000)
	charge := budget.Charge{Scope: hotScope(), Amount: 1, Limits: roomy}
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

// against compares Allow in turns with another limiter, 8 goroutines over 1,000 scopes.
func (k *kit) against(ctx context.Context, b *bench, name string, calls int, other func(scope string) (refused bool, err error)) (s samples, err error) {
	p, err := k.lease(leases.Rule{Least: 10_000, TTL: hotRule.TTL, Idle: hotRule.Idle})
	if err != nil {
		return s, err
	}
	scopes := make([]string, 1000) // made before they are measured
	for i := range scopes {
		scopes[i] = scopeName(i)
	}
	var allows, others []float64
	for round := range b.rounds() + 1 {
		fast, _, err := deciding(8, b.pick(2_000_000, 400_000)/8, func(i int) error {
			return p.Allow(ctx, budget.Charge{Scope: scopes[i*7919%1000], Amount: 1, Limits: roomy})
		})
		if err != nil {
			return s, err
		}
		slow, _, err := deciding(8, calls/8, func(i int) error {
			refused, err := other(scopes[i*7919%1000])
			if err == nil && refused {
				err = errors.New("refused")
			}
			return err
		})
		if err != nil {
			return s, fmt.Errorf("%s: %w", name, err)
		}
		if round > 0 {
			allows, others = append(allows, 1e9/fast), append(others, 1e9/slow)
		}
	}
	return samples{values: ratios(allows, others), note: fmt.Sprintf("allow %s/s, %s %s/s", number(median(allows)), name, number(median(others)))}, nil
}

func allowAgainstRedis(ctx context.Context, b *bench, k *kit) (samples, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return samples{notRun: redisFix}, nil
	}
	r, err := startRedis(ctx, program)
	if err != nil {
		return samples{}, err
	}
	defer r.stop()
	rate := redis_rate.NewLimiter(r.client)
	limit := redis_rate.Limit{Rate: 1_000_000_000, Burst: 1_000_000_000, Period: time.Hour}
	return k.against(ctx, b, "redis_rate", b.pick(80_000, 8_000), func(scope string) (bool, error) {
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
	return k.against(ctx, b, "throttled", b.pick(2_000_000, 400_000), func(scope string) (bool, error) {
		limited, _, err := gcra.RateLimitCtx(ctx, scope, 1)
		return limited, err
	})
}

// stranded lets 4 processes spend a budget to its end, and counts the units that they keep and do not use.
func stranded(ctx context.Context, b *bench, k *kit) (samples, error) {
	whole := int64(b.pick(1_000_000, 200_000))
	limits := []budget.Limit{budget.Lifetime(whole)}
	var allowed atomic.Int64
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var group sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		p, err := k.lease(leases.Rule{})
		if err != nil {
			return samples{}, err
		}
		group.Go(func() {
			for n := 0; allowed.Load() < whole && ctx.Err() == nil; n++ {
				var refused *budget.ExceededError
				switch err := p.Allow(ctx, budget.Charge{Scope: hotScope(), Amount: 1, Limits: limits}); {
				case err == nil:
					allowed.Add(1)
				case !errors.As(err, &refused):
					errs[i] = err
					return
				default:
					time.Sleep(time.Millisecond)
				}
				if n%100 == 99 { // 25,000 a second each
					time.Sleep(4 * time.Millisecond)
				}
			}
		})
	}
	var sum, n, most float64
	for allowed.Load() < whole && ctx.Err() == nil && errors.Join(errs...) == nil {
		used := allowed.Load()
		u, err := k.client.Budget.Usage(ctx, k.Pool, budget.Query{Scope: hotScope()})
		if err != nil {
			return samples{}, err
		}
		kept := max(0, float64(u[0].Spent+u[0].Leased-allowed.Load())) / float64(whole) * 100
		if used > whole/10*9 {
			sum, n, most = sum+kept, n+1, max(most, kept)
		}
		time.Sleep(2 * time.Millisecond)
	}
	group.Wait()
	if err := errors.Join(append(errs, ctx.Err())...); err != nil {
		return samples{}, err
	}
	return samples{values: []float64{sum / max(n, 1)}, note: fmt.Sprintf("at most %s %%, in %.0f samples; all %d units were spent in the end", number(most), n, whole)}, nil
}

// overAdmissionSQL is the largest total of any window. A lease's capture is counted by its spends.
const overAdmissionSQL = `
select coalesce(max(w.units), 0)::bigint from (
    select sum(a.amount) over (order by a.at range between interval '999999 microseconds' preceding and current row) as units
    from (select at, amount from metered.ledger where kind = 'c' union all select at, amount from metered.lease_spends) a) w`

func overAdmission(ctx context.Context, b *bench, k *kit) (samples, error) {
	const most = 1000
	charge := budget.Charge{Scope: hotScope(), Amount: 1, Limits: []budget.Limit{budget.PerWindow(most, time.Second)}}
	var pools []*leases.Pool
	for range 4 {
		p, err := k.lease(leases.Rule{Share: 8, Idle: 50 * time.Millisecond})
		if err != nil {
			return samples{}, err
		}
		pools = append(pools, p)
	}
	var refused atomic.Int64
	n, _, err := drive(ctx, func(ctx context.Context, client int) error {
		err := pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			if client%4 == 3 {
				_, err := k.client.Budget.Charge(ctx, tx, charge)
				return err
			}
			_, err := pools[client%4].Charge(ctx, tx, charge)
			return err
		})
		if errors.Is(err, budget.ErrExceeded) {
			refused.Add(1)
			return nil
		}
		return err
	}, 8, time.Duration(b.pick(10, 3))*time.Second, -1)
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

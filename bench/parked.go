package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/tracelog"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
)

var parkedFigures = []figure{
	costs("enqueue_gated_vs_keyed", atMost(1.5), "enqueueing a job whose units fit and are held against one with a key, one client",
		oneOf(1000), entry{"gated", enqueueGated}, entry{"keyed", enqueue(true)}),
	{"gated_jobs_vs_river", "times the rate", atLeast(0.95), "jobs of 50 ms that 20 workers do a second, 2 at once of each of 1,000 tenants with 100,000 parked, against River without limits",
		gatedJobs},
	{"parked_start_ms", "ms, p95", atMost(50), "from the commit that frees a slot to the start of the parked job, River fetching at once", on(options{}, hotScope, parkedStart)},
	{"parked_wal_1e5_vs_1e3", "times the bytes", atMost(1.2), "WAL of a job that ends and the parked one that it starts, with 100,000 parked against 1,000", parkedWAL},
	{"parked_statements_1e5_vs_1e3", "times the statements", atMost(1.2), "statements, also River's, for each job that workers do and the parked one that it starts, with 100,000 parked against 1,000", parkedStatements},
}

const slots = 2 // of a tenant

func slot(scope string) *jobs.Units {
	return &jobs.Units{Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(slots)}}}}
}

func enqueueGated(k *kit) contender {
	return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		request := &jobs.Units{Lines: []holds.Line{{Scope: k.scope(), Amount: 1, Limits: roomy}}}
		result, err := k.client.Jobs.Enqueue(ctx, tx, work{N: 1}, &jobs.Options{Hold: request})
		if err == nil && result.Parked {
			err = errors.New("it is parked")
		}
		return err
	})
}

// park enqueues n jobs of so many tenants, and returns those that start at once.
func (k *kit) park(ctx context.Context, n, tenants int) (started []*rivertype.JobRow, err error) {
	const batch = 500
	for from := 0; from < n && err == nil; from += batch {
		var items []jobs.Item
		for i := from; i < min(n, from+batch); i++ {
			items = append(items, jobs.Item{Args: work{N: i}, Options: &jobs.Options{Tenant: scopeName(i % tenants), Hold: slot(scopeName(i % tenants))}})
		}
		err = pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			results, err := k.client.Jobs.EnqueueMany(ctx, tx, items)
			for _, r := range results {
				if r.Job != nil {
					started = append(started, r.Job)
				}
			}
			return err
		})
	}
	return started, err
}

// working lets River work jobs while fn runs, and parked ones start.
func (k *kit) working(ctx context.Context, do func(context.Context, *river.Job[work]) error, fn func() error) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(do))
	if err := k.setUp(&river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 20}},
		FetchCooldown: 5 * time.Millisecond, FetchPollInterval: 100 * time.Millisecond,
	}); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if err := k.queue.Start(ctx); err != nil {
		return err
	}
	running := make(chan error, 1)
	go func() { running <- k.client.Jobs.Run(ctx, k.Pool, nil) }()
	err := fn()
	stop()
	<-running
	return errors.Join(err, k.queue.Stop(context.WithoutCancel(ctx)))
}

// gatedJobs compares River alone with gated jobs, in turns.
func gatedJobs(ctx context.Context, b *bench) (samples, error) {
	var kits [2]*kit
	for i := range kits {
		var err error
		if kits[i], err = b.kit(ctx, options{conns: 30}, nil); err != nil {
			return samples{}, err
		}
		defer kits[i].drop()
	}
	gated, plain := kits[0], kits[1]
	if _, err := gated.park(ctx, b.pick(102_000, 4_000), 1000); err != nil {
		return samples{}, err
	}
	for range b.pick(40, 4) {
		batch := several(500, func() river.InsertManyParams { return river.InsertManyParams{Args: work{}} })
		if _, err := plain.queue.InsertManyFast(ctx, batch); err != nil {
			return samples{}, err
		}
	}
	rates := map[*kit][]float64{}
	length := time.Duration(b.pick(6000, 500)) * time.Millisecond
	for round := range b.rounds() + 1 {
		for i := range 2 {
			k := kits[(i+round)%2]
			var done atomic.Int64
			err := k.working(ctx, func(ctx context.Context, _ *river.Job[work]) error {
				time.Sleep(50 * time.Millisecond)
				done.Add(1)
				return nil
			}, func() error {
				time.Sleep(length / 6)
				from, began := done.Load(), time.Now()
				time.Sleep(length)
				if round > 0 {
					rates[k] = append(rates[k], float64(done.Load()-from)/time.Since(began).Seconds())
				}
				return nil
			})
			if err != nil {
				return samples{}, err
			}
		}
	}
	return samples{values: ratios(rates[gated], rates[plain]),
		note: fmt.Sprintf("gated %s/s, River %s/s", number(median(rates[gated])), number(median(rates[plain])))}, nil
}

// parkedStart frees the slot of a parked job again and again.
func parkedStart(ctx context.Context, b *bench, k *kit) (samples, error) {
	var all samples
	began := make(chan time.Time, 1)
	err := k.working(ctx, func(context.Context, *river.Job[work]) error { began <- time.Now(); return nil }, func() error {
		for n := range b.pick(5, 2) {
			var waits []float64
			for i := range b.pick(60, 20) {
				scope := fmt.Sprint("start/", n, "/", i)
				place := holds.Placement{ID: scope, TTL: time.Minute, Lines: slot(scope).Lines}
				place.Lines[0].Amount = slots
				err := pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
					if _, err := k.client.Holds.Place(ctx, tx, place); err != nil {
						return err
					}
					_, err := k.client.Jobs.Enqueue(ctx, tx, work{N: i}, &jobs.Options{Hold: slot(scope)})
					return err
				})
				if err == nil {
					err = k.release(ctx, scope)
				}
				if err != nil {
					return err
				}
				freed := time.Now()
				select {
				case at := <-began:
					waits = append(waits, float64(at.Sub(freed).Microseconds())/1000)
				case <-time.After(time.Minute):
					return errors.New("a parked job does not start")
				}
			}
			all.values = append(all.values, quantile(waits, 0.95))
			all.note = "median " + number(median(waits)) + " ms"
		}
		return nil
	})
	return all, err
}

// startNext ends a job, which starts the next of its tenant.
func startNext(n int) func(*kit) contender {
	return func(k *kit) contender {
		var running []*rivertype.JobRow
		c := k.inTx(func(ctx context.Context, tx pgx.Tx) error {
			if len(running) == 0 {
				return errOut
			}
			job := running[0]
			tenant := jobs.Of(job).Tenant
			if _, err := k.client.Holds.Release(ctx, tx, holds.Release{Tenant: tenant, IDs: []string{jobs.Of(job).Hold}}); err != nil {
				return err
			}
			results, err := k.client.Jobs.ReleaseIn(ctx, tx, tenant)
			if err == nil && len(results) != 1 {
				err = fmt.Errorf("%d jobs start where one ended", len(results))
			}
			if err == nil {
				running = append(running[1:], results[0].Job)
			}
			return err
		})
		c.stock = func(ctx context.Context, _ int) (err error) {
			if running == nil {
				if running, err = k.park(ctx, n, n/100); err == nil {
					_, err = k.Exec(ctx, "vacuum analyze metered.parked_jobs, river_job, metered.holds, metered.ledger")
				}
			}
			return err
		}
		return c
	}
}

func parkedWAL(ctx context.Context, b *bench) (samples, error) {
	many := b.pick(100_000, 5_000)
	c := b.sequential()
	c.rounds = b.pick(40, 10) // each tenant has a hundred jobs
	out, err := b.compare(ctx, c, options{}, nil, entry{"many", startNext(many)}, entry{"few", startNext(1000)})
	if err != nil {
		return samples{}, err
	}
	s := out.cost("many", "few")
	return samples{values: []float64{out.where[0].walBytes / out.where[1].walBytes}, where: s.where,
		note: fmt.Sprintf("%.0f and %.0f bytes; %s", out.where[0].walBytes, out.where[1].walBytes, s.note)}, nil
}

// counting counts the statements that a connection sends.
func counting(n *atomic.Int64) pgx.QueryTracer {
	return &tracelog.TraceLog{LogLevel: tracelog.LogLevelInfo, Logger: tracelog.LoggerFunc(func(_ context.Context, _ tracelog.LogLevel, msg string, _ map[string]any) {
		if msg == "Query" || msg == "BatchQuery" {
			n.Add(1)
		}
	})}
}

// parkedStatements lets workers do some of the jobs of ten tenants, in turns.
func parkedStatements(ctx context.Context, b *bench) (s samples, err error) {
	kits, sent := make([]*kit, 2), make([]atomic.Int64, 2)
	for i, n := range []int{b.pick(100_000, 5_000), 1_000} {
		if kits[i], err = b.kit(ctx, options{conns: 30, tracer: counting(&sent[i])}, nil); err != nil {
			return s, err
		}
		defer kits[i].drop()
		if _, err = kits[i].park(ctx, n, 10); err != nil {
			return s, err
		}
	}
	const each = 150
	var per [2][]float64
	for range b.pick(5, 2) {
		for i, k := range kits {
			var done atomic.Int64
			enough := make(chan struct{})
			err := k.working(ctx, func(context.Context, *river.Job[work]) error {
				time.Sleep(20 * time.Millisecond)
				if done.Add(1) == each {
					close(enough)
				}
				return nil
			}, func() error {
				before := sent[i].Load()
				select {
				case <-enough:
				case <-time.After(5 * time.Minute):
					return fmt.Errorf("%d of %d jobs in five minutes", done.Load(), each)
				}
				per[i] = append(per[i], float64(sent[i].Load()-before)/each)
				return nil
			})
			if err != nil {
				return s, err
			}
		}
	}
	return samples{values: ratios(per[0], per[1]), note: fmt.Sprintf("%.1f and %.1f a job", median(per[0]), median(per[1]))}, nil
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// contender is one way to do a thing.
type contender struct {
	name string
	site *site // nil for one without Postgres

	// op does it once, for one of the clients.
	op func(ctx context.Context, client int) error

	// stock prepares n ops or more before each slice, outside the measured time. Nil if they need
	// none.
	stock func(ctx context.Context, n int) error

	watch *watch  // in a comparison. Nil without Postgres
	rate  float64 // of its last slice
}

// comparison runs contenders in turns, A B C B C A …, so that disturbances of the machine meet them
// all alike.
type comparison struct {
	contenders []contender
	clients    int
	slice      time.Duration
	rounds     int
	length     time.Duration // of all rounds. Defaults to the bench's patience
	count      int           // ops a slice. Defaults to as many as fit
}

// outcome is the result of a comparison. Each of its slices has a value per round.
type outcome struct {
	names []string
	rates map[string][]float64 // ops per second
	where []profile            // in the order of the contenders
}

// run runs one round more than is counted, to warm up.
func (c comparison) run(ctx context.Context, b *bench) (outcome, error) {
	out := outcome{rates: map[string][]float64{}}
	entrants := slices.Clone(c.contenders)
	for i, e := range entrants {
		if e.site != nil {
			w, err := newWatch(ctx, e.name, e.site)
			if err != nil {
				return out, err
			}
			defer w.close()
			entrants[i].watch = w
		}
	}
	began := time.Now()
	for round := range c.rounds + 1 {
		if round > b.pick(3, 2) && time.Since(began) > cmp.Or(c.length, b.patience()) {
			b.logf("  stopped after %d rounds", round-1)
			break
		}
		for k := range entrants {
			e := &entrants[(k+round)%len(entrants)]
			if err := c.turn(ctx, b, e, round > 0); err != nil {
				return out, fmt.Errorf("%s: %w", e.name, err)
			}
			if round > 0 {
				out.rates[e.name] = append(out.rates[e.name], e.rate)
			}
		}
	}
	for _, e := range entrants {
		out.names = append(out.names, e.name)
		if e.watch != nil {
			out.where = append(out.where, e.watch.profile(out.rates[e.name]))
		}
	}
	return out, nil
}

// turn is one contender's slice of a round.
func (c comparison) turn(ctx context.Context, b *bench, e *contender, counts bool) error {
	length := c.slice
	if !counts {
		length = min(length, time.Duration(b.pick(300, 100))*time.Millisecond)
	}
	if c.count > 0 {
		length = time.Minute
	}
	if e.stock != nil {
		n := c.count
		if n == 0 {
			n = int(1.3*e.rate*length.Seconds()) + 10*c.clients
		}
		if err := e.stock(ctx, n); err != nil {
			return err
		}
	}
	if err := e.watch.note(ctx, 0, false); err != nil {
		return err
	}
	n, seconds, err := drive(ctx, e.op, c.clients, length, c.count)
	if err != nil {
		return err
	}
	e.rate = float64(n) / seconds
	return e.watch.note(ctx, n, counts)
}

// ratio is how many times as fast as b contender a was, round by round.
func (o outcome) ratio(a, b string) samples {
	return o.against(a, b, ratios(o.rates[a], o.rates[b]), func(rate float64) string { return number(rate) + "/s" })
}

// cost is how many times as long contender a took as b.
func (o outcome) cost(a, b string) samples {
	return o.against(a, b, ratios(o.rates[b], o.rates[a]), func(rate float64) string { return number(1e6/rate) + " µs" })
}

// against notes all contenders, a and b first.
func (o outcome) against(a, b string, values []float64, shown func(rate float64) string) samples {
	s := samples{values: values}
	names := slices.Concat([]string{a, b}, slices.DeleteFunc(slices.Clone(o.names), func(name string) bool { return name == a || name == b }))
	var notes []string
	for _, name := range names {
		notes = append(notes, name+" "+shown(median(o.rates[name])))
		if i := slices.IndexFunc(o.where, func(p profile) bool { return p.contender == name }); i >= 0 {
			s.where = append(s.where, o.where[i])
		}
	}
	s.note = strings.Join(notes, ", ")
	return s
}

// errOut is an op's answer when it has nothing left to work with.
var errOut = errors.New("out of stock")

// drive lets clients run op until the time is up, or as many ops have begun as the limit says
// unless it is 0, and returns how many were done in how many seconds. An op that has begun is
// finished and counted.
func drive(ctx context.Context, op func(context.Context, int) error, clients int, length time.Duration, limit int) (int, float64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var begun, done atomic.Int64
	var failed error
	var once sync.Once
	var group sync.WaitGroup
	began := time.Now()
	for client := range clients {
		group.Go(func() {
			for time.Since(began) < length && ctx.Err() == nil {
				if limit > 0 && begun.Add(1) > int64(limit) {
					return
				}
				err := op(ctx, client)
				if errors.Is(err, errOut) {
					return
				}
				if err != nil {
					once.Do(func() { failed = err; cancel() })
					return
				}
				done.Add(1)
			}
		})
	}
	group.Wait()
	seconds := time.Since(began).Seconds()
	switch {
	case failed != nil:
		return 0, 0, failed
	case ctx.Err() != nil:
		return 0, 0, context.Cause(ctx)
	case done.Load() == 0:
		return 0, 0, errors.New("nothing was done")
	}
	return int(done.Load()), seconds, nil
}

// patience is how long a comparison may take after its first rounds, so that a run on a slow or
// busy machine ends in its time as well, with fewer rounds. It ends when the run is late.
func (b *bench) patience() time.Duration {
	late, each := 9*time.Minute, 40*time.Second
	if b.short {
		late, each = 40*time.Second, 1500*time.Millisecond
	}
	if time.Since(b.began) > late {
		return 0
	}
	return each
}

// shortTurn is the number of ops in a turn of one client: the load of a shared machine changes by
// the second, and must not fall to one contender.
const shortTurn = 20

// sequential is a comparison by one client.
func (b *bench) sequential(contenders ...contender) comparison {
	return comparison{contenders: contenders, clients: 1, count: shortTurn, rounds: b.pick(250, 21)}
}

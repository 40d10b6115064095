package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// profile is where a contender's time went, per op, over all its slices.
type profile struct {
	Contender     string             `json:"contender"`
	Rate          float64            `json:"rate"`                     // ops per second, the median of the rounds
	BackendMicros *float64           `json:"backend_cpu_us,omitempty"` // of its Postgres backends
	ClientMicros  float64            `json:"client_cpu_us"`            // of this program, its proxy included
	WALBytes      float64            `json:"wal_bytes"`                // of the server, by all its backends
	Waits         map[string]float64 `json:"waits,omitempty"`          // shares of the time of all backends

	rates []float64 // of the rounds
}

// watch measures a contender's profile on a connection of its own, past any proxy.
type watch struct {
	conn    *pgx.Conn
	name    string
	withCPU bool

	ops   int
	sum   reading
	waits map[string]int
}

// reading is the values of the counters.
type reading struct{ backend, client, wal float64 }

// watchName tells a watch's session from those that are watched.
const watchName = "metered bench watch"

func newWatch(ctx context.Context, name string, s *site) (*watch, error) {
	cfg := s.direct()
	cfg.RuntimeParams["application_name"] = watchName
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	w := &watch{conn: conn, name: name, withCPU: true, waits: map[string]int{}}
	_, err = w.read(ctx)
	w.withCPU = err == nil // not on every platform, and not for every role
	return w, nil
}

func (w *watch) close() {
	if w != nil {
		_ = w.conn.Close(context.Background())
	}
}

const walSQL = `select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8`

// The first number of schedstat is the nanoseconds that a process spent on a CPU.
const backendsSQL = `
select coalesce(sum(split_part(pg_read_file('/proc/' || pid || '/schedstat', 0, 200, true), ' ', 1)::float8), 0)
from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()`

func (w *watch) read(ctx context.Context) (r reading, err error) {
	if w.withCPU {
		if err := w.conn.QueryRow(ctx, backendsSQL).Scan(&r.backend); err != nil {
			return r, err
		}
	}
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return r, err
	}
	r.client = float64(usage.Utime.Nano() + usage.Stime.Nano())
	return r, w.conn.QueryRow(ctx, walSQL).Scan(&r.wal)
}

const waitsSQL = `
select case when state = 'active' then coalesce(wait_event_type || ':' || wait_event, 'on CPU')
            when state like 'idle in transaction%' then 'idle in transaction' else 'idle' end, count(*)
from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
group by 1`

// start begins a slice and returns the function that ends it. It does not watch a slice that does not count, and a
// nil watch watches none.
func (w *watch) start(ctx context.Context, counts bool) func(ops int) error {
	if w == nil || !counts {
		return func(int) error { return nil }
	}
	before, err := w.read(ctx)
	if err != nil {
		return func(int) error { return err }
	}
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() { stopped <- w.sample(ctx, stop) }()
	return func(ops int) error {
		close(stop)
		if err := <-stopped; err != nil {
			return err
		}
		after, err := w.read(ctx)
		if err != nil {
			return err
		}
		w.ops += ops
		w.sum.backend += after.backend - before.backend
		w.sum.client += after.client - before.client
		w.sum.wal += after.wal - before.wal
		return nil
	}
}

// sample reads the waits of the backends, 50 times a second.
func (w *watch) sample(ctx context.Context, stop <-chan struct{}) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return nil
		case <-tick.C:
		}
		rows, err := w.conn.Query(ctx, waitsSQL)
		if err != nil {
			return err
		}
		var event string
		var n int
		_, err = pgx.ForEachRow(rows, []any{&event, &n}, func() error {
			w.waits[event] += n
			return nil
		})
		if err != nil {
			return err
		}
	}
}

// profile is the samples' result, with the rates of its slices.
func (w *watch) profile(rates []float64) profile {
	n := float64(max(w.ops, 1))
	p := profile{
		Contender: w.name, Rate: median(rates), rates: rates,
		ClientMicros: w.sum.client / n / 1000, WALBytes: w.sum.wal / n, Waits: map[string]float64{},
	}
	if w.withCPU {
		micros := w.sum.backend / n / 1000
		p.BackendMicros = &micros
	}
	total := 0
	for _, n := range w.waits {
		total += n
	}
	for event, n := range w.waits {
		p.Waits[event] = float64(n) / float64(total)
	}
	return p
}

func (p profile) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s/s; per op", p.Contender, number(p.Rate))
	if p.BackendMicros != nil {
		fmt.Fprintf(&b, " %.0f µs CPU in its backends,", *p.BackendMicros)
	}
	fmt.Fprintf(&b, " %.0f µs CPU in this program, %.0f bytes of WAL", p.ClientMicros, p.WALBytes)
	if events := p.topWaits(5); len(events) > 0 {
		fmt.Fprintf(&b, "; its backends were %s", strings.Join(events, ", "))
	}
	return b.String()
}

// topWaits names the most frequent states, from 2 % on.
func (p profile) topWaits(most int) []string {
	events := slices.SortedFunc(maps.Keys(p.Waits), func(a, b string) int {
		return cmp.Or(cmp.Compare(p.Waits[b], p.Waits[a]), cmp.Compare(a, b))
	})
	var out []string
	for _, e := range events[:min(most, len(events))] {
		if p.Waits[e] >= 0.02 {
			out = append(out, fmt.Sprintf("%s %.0f %%", e, 100*p.Waits[e]))
		}
	}
	return out
}

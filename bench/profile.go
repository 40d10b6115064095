package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// profile is where a contender's time went, per op, over all its slices.
type profile struct {
	contender     string
	rate          float64  // ops per second, the median of the rounds
	backendMicros *float64 // CPU of its Postgres backends
	walBytes      float64  // of the server, by all its backends
}

// watch measures a contender's profile on a connection of its own, past any proxy.
type watch struct {
	conn    *pgx.Conn
	name    string
	withCPU bool

	ops int
	sum reading
}

// reading is the values of the counters.
type reading struct{ backend, wal float64 }

// watchName tells a watch's session from those that are watched.
const watchName = "metered bench watch"

func newWatch(ctx context.Context, name string, s *site) (*watch, error) {
	cfg := s.direct()
	cfg.RuntimeParams["application_name"] = watchName
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	w := &watch{conn: conn, name: name, withCPU: true}
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
	return r, w.conn.QueryRow(ctx, walSQL).Scan(&r.wal)
}

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
	return func(ops int) error {
		after, err := w.read(ctx)
		if err != nil {
			return err
		}
		w.ops += ops
		w.sum.backend += after.backend - before.backend
		w.sum.wal += after.wal - before.wal
		return nil
	}
}

// profile is the samples' result, with the rates of its slices.
func (w *watch) profile(rates []float64) profile {
	n := float64(max(w.ops, 1))
	p := profile{contender: w.name, rate: median(rates), walBytes: w.sum.wal / n}
	if w.withCPU {
		micros := w.sum.backend / n / 1000
		p.backendMicros = &micros
	}
	return p
}

func (p profile) String() string {
	backends := ""
	if p.backendMicros != nil {
		backends = fmt.Sprintf(" %.0f µs CPU in its backends,", *p.backendMicros)
	}
	return fmt.Sprintf("%s: %s/s; per op%s %.0f bytes of WAL", p.contender, number(p.rate), backends, p.walBytes)
}

package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// profile is where a contender's time went, per op, over all its slices.
type profile struct {
	contender     string
	rate          float64 // ops per second, the median of the rounds
	backendMicros float64 // CPU of its Postgres backends, or 0 where the platform does not say
	walBytes      float64 // of the server, by all its backends
}

// watch measures a contender's profile on a connection of its own, past any proxy.
type watch struct {
	conn      *pgx.Conn
	name      string
	ops       int
	sum, last struct{ backend, wal float64 } // of the counters
}

func newWatch(ctx context.Context, name string, s *site) (*watch, error) {
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return nil, err
	}
	return &watch{conn: conn, name: name}, nil
}

func (w *watch) close() { _ = w.conn.Close(context.Background()) }

// The first number of schedstat is the nanoseconds that a process spent on a CPU.
const readingSQL = `
select coalesce(sum(split_part(pg_read_file('/proc/' || pid || '/schedstat', 0, 200, true), ' ', 1)::float8), 0),
    pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8
from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()`

// note reads the counters, and adds what the ops took since the last note if they count. A nil
// watch notes nothing.
func (w *watch) note(ctx context.Context, ops int, counts bool) error {
	if w == nil {
		return nil
	}
	now := w.last
	err := w.conn.QueryRow(ctx, readingSQL).Scan(&now.backend, &now.wal)
	if counts {
		w.ops += ops
		w.sum.backend += now.backend - w.last.backend
		w.sum.wal += now.wal - w.last.wal
	}
	w.last = now
	return err
}

// profile is the samples' result, with the rates of its slices.
func (w *watch) profile(rates []float64) profile {
	n := float64(max(w.ops, 1))
	return profile{contender: w.name, rate: median(rates), backendMicros: w.sum.backend / n / 1000, walBytes: w.sum.wal / n}
}

func (p profile) String() string {
	backends := ""
	if p.backendMicros > 0 {
		backends = fmt.Sprintf(" %.0f µs CPU in its backends,", p.backendMicros)
	}
	return fmt.Sprintf("%s: %s/s; per op%s %.0f bytes of WAL", p.contender, number(p.rate), backends, p.walBytes)
}

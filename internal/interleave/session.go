package interleave

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// gatesSQL makes the gate. A session that has no key passes. Another counts the gate, passes if the
// explorer has opened it ahead, and else says which gate it has reached, and waits for one of two
// locks by turns, which the explorer holds. Sequences count, since they are not rolled back.
const gatesSQL = `
create schema gates;
create function gates.pass(place text) returns void
language plpgsql volatile
as $$
declare
    key int := nullif(current_setting('gates.key', true), '')::int;
    n   bigint;
begin
    if key is null then
        return;
    end if;
    if nextval(current_setting('gates.reached')::oid::regclass) <= pg_sequence_last_value(current_setting('gates.ahead')::oid::regclass) then
        return;
    end if;
    n := nextval('pg_temp.waits');
    raise info 'gate %', place;
    perform pg_advisory_lock(key, (n & 1)::int);
    perform pg_advisory_unlock(key, (n & 1)::int);
end
$$;
`

// A session runs calls on one connection, step by step.
type session struct {
	pool    *pgxpool.Pool
	pid     uint32
	key     int
	events  chan event
	resume  chan struct{}
	stepped atomic.Bool

	// Of the call that runs.
	state  state
	at     string // the gate at which it waits
	server bool   // whether that gate is one inside a function
	passed int64  // gates inside functions
	waits  int    // the gates inside functions at which the session waited, in all calls

	ahead atomic.Int64 // the gates before the client's statements that are open
}

// gates are numbers of gates: those before statements of the client, and those inside functions.
type gates struct{ client, server int64 }

const every = 1 << 40 // is more than a call has

type state int

const (
	running state = iota
	waiting       // at a gate
	blocked       // by a lock of another session
	ended
)

type event struct {
	place  string
	server bool
	done   bool
	err    error
}

// open gives the session a pool of one connection, with gates.
func (s *session) open(ctx context.Context, config *pgxpool.Config) (err error) {
	s.events = make(chan event, 16)
	s.resume = make(chan struct{})
	config = config.Copy()
	config.MinConns, config.MaxConns = 0, 1
	config.ConnConfig.RuntimeParams["deadlock_timeout"] = "10ms"
	config.ConnConfig.RuntimeParams["jit"] = "off"
	config.ConnConfig.RuntimeParams["plan_cache_mode"] = "force_generic_plan"
	config.ConnConfig.Tracer = gateTracer{s}
	config.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if place, ok := strings.CutPrefix(n.Message, "gate "); ok {
			s.events <- event{place: place, server: true}
		}
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		s.pid = conn.PgConn().PID()
		_, err := conn.Exec(ctx, fmt.Sprintf(`create temp sequence waits minvalue 0 start 0;
			create sequence if not exists gates.reached%[1]d; create sequence if not exists gates.ahead%[1]d minvalue 0;
			set gates.key = '%[1]d'; select set_config('gates.' || of, ('gates.' || of || '%[1]d')::regclass::oid::text, false) from (values ('reached'), ('ahead')) v(of)`,
			s.key), pgx.QueryExecModeSimpleProtocol)
		return err
	}
	if s.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	return s.pool.Ping(ctx)
}

// start runs a call in the background. It waits at a gate before its first statement.
func (s *session) start(ctx context.Context, call func(context.Context, *pgxpool.Pool) error) {
	s.state, s.at, s.passed = running, "", 0
	s.ahead.Store(0)
	s.stepped.Store(true)
	go func() {
		err := call(ctx, s.pool)
		s.stepped.Store(false)
		s.events <- event{done: true, err: err}
	}()
}

// gateTracer is the gate before each statement that the client sends.
type gateTracer struct{ s *session }

func (g gateTracer) wait(ctx context.Context, sql string) {
	if !g.s.stepped.Load() || g.s.ahead.Add(-1) >= 0 {
		return
	}
	g.s.events <- event{place: short(sql)}
	select {
	case <-g.s.resume:
	case <-ctx.Done():
	}
}

func short(sql string) string {
	sql = strings.Join(strings.Fields(sql), " ")
	if len(sql) > 60 {
		sql = sql[:60] + "…"
	}
	return sql
}

func (g gateTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	g.wait(ctx, d.SQL)
	return ctx
}

func (gateTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (g gateTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	g.wait(ctx, fmt.Sprintf("batch of %d", d.Batch.Len()))
	return ctx
}

func (gateTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (gateTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

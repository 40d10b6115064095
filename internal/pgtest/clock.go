package pgtest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Clock is the library's time in one database. Every session sees Set and Advance at once, in open
// transactions and under old snapshots too. Only the owner of the schema can set one up: production
// roles cannot.
type Clock struct {
	t     testing.TB
	mu    sync.Mutex
	conns []*pgx.Conn // its own, since the test may hold all of the pool's
	now   time.Time
}

// A sequence keeps the time, in microseconds since 1970: setval is seen at once and survives a
// rollback, while a table's row would be hidden from older snapshots. The function is a security
// definer so that any role can read the time and only the owner can reach the sequence. Whole
// seconds are apart, since an interval is multiplied in floating point. A SELECT from the sequence
// would be a sequential scan, so expensive under enable_seqscan = off that Postgres compiles it
// (jit) each time.
const clockSQL = `
do $do$
declare
    f record;
begin
    create schema if not exists pgtest;
    create sequence if not exists pgtest.clock minvalue -9223372036854775808;
    for f in select p.oid::regprocedure::text as signature
               from pg_catalog.pg_proc p
              where p.proname = 'clock' and p.pronargs = 0 and p.prorettype = 'timestamptz'::regtype
    loop
        execute 'create or replace function ' || f.signature || $body$
            returns timestamptz language sql volatile security definer
            as $$ select timestamptz 'epoch' + us / 1000000 * interval '1 second'
                                             + us % 1000000 * interval '1 microsecond'
                  from pg_catalog.pg_sequence_last_value('pgtest.clock') us $$
        $body$;
    end loop;
    if not found then
        raise exception 'this database has no function clock() to replace: it needs the schema';
    end if;
end
$do$`

const setClockSQL = `select setval('pgtest.clock', $1)`

// Tomorrow is an hour of tomorrow's date, for a clock under which operations have ids of
// metered.NewID: those carry this machine's time, which is in the future for a clock of the past.
func Tomorrow(hour int) time.Time {
	y, m, d := time.Now().UTC().Date()
	return time.Date(y, m, d+1, hour, 0, 0, 0, time.UTC)
}

// SetClock stops the library's clock in the pool's database at the given time, in a schema of any
// name. From then on only Set and Advance move it. The time is cut to microseconds.
//
// Call it before the transactions that need it. An open transaction that has read the time may keep
// a plan with the real clock until it ends: Postgres looks for replaced functions when a
// transaction starts or takes a new lock.
func SetClock(t testing.TB, pool *pgxpool.Pool, at time.Time) *Clock {
	t.Helper()
	ctx := context.Background()
	conns, err := connectEach(ctx, pool.Config().ConnConfig)
	if err != nil {
		t.Fatalf("pgtest: setting the clock: %v", err)
	}
	c := &Clock{t: t, conns: conns, now: time.UnixMicro(at.UnixMicro()).UTC()}
	for _, conn := range conns {
		t.Cleanup(func() { _ = conn.Close(ctx) })
		// One transaction: the function must not be seen before the sequence has its value.
		if err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, clockSQL); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, setClockSQL, at.UnixMicro())
			return err
		}); err != nil {
			t.Fatalf("pgtest: setting the clock: %v", err)
		}
	}
	return c
}

// Set moves the clock to a time, which may be an earlier one.
func (c *Clock) Set(at time.Time) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(at)
}

// Advance moves the clock by d, which may be negative.
func (c *Clock) Advance(d time.Duration) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(c.now.Add(d))
}

// Now returns the clock's time, in UTC.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *Clock) set(at time.Time) {
	c.t.Helper()
	at = time.UnixMicro(at.UnixMicro()).UTC()
	for _, conn := range c.conns {
		if _, err := conn.Exec(context.Background(), setClockSQL, at.UnixMicro()); err != nil {
			c.t.Fatalf("pgtest: setting the clock: %v", err)
		}
	}
	c.now = at
}

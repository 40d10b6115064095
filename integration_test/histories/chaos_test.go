package main

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// clockSQL makes the library's clock that of the server with a step in it.
const (
	clockSQL = `create schema stepped; create sequence stepped.clock minvalue -1000000000; select setval('stepped.clock', 0);` + steppedSQL
	// An upgrade makes the clock again.
	steppedSQL = `create or replace function metered.clock() returns timestamptz language sql volatile security definer
	as $$ select pg_catalog.clock_timestamp() + pg_catalog.pg_sequence_last_value('stepped.clock') * interval '1 ms' $$`
)

// fillLocks takes all that is left of the server's table of locks, for a while: statements of others fail.
func (w *world) fillLocks(ctx context.Context) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		for n := 0; ; n++ {
			if err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "select pg_advisory_xact_lock(77, g) from generate_series($1::int, $1::int + 499) g", n*500)
				return err
			}); err != nil {
				time.Sleep(time.Duration(pgtest.Random(w.T).Int64N(int64(50 * time.Millisecond)))) // for so long there are none
				return err
			}
		}
	})
}

// chaos ends, kills and stops backends of the server, and the server itself, in the pace of the calls.
func (w *world) chaos() {
	ctx := context.Background()
	crash := w.calls / 4
	for next, crashes := int64(10), int64(1); w.more(); {
		if w.standby != nil && w.faults["promoted"].Load() == 0 && w.ended.Load() > w.calls/2 {
			w.promote()
			continue
		}
		if w.ended.Load() < next {
			time.Sleep(time.Millisecond) // faults go by the number of calls
			continue
		}
		next += 1 + pgtest.Random(w.T).Int64N(60)
		if next > crash*crashes {
			crashes++
			w.faults["crashed"].Add(1)
			w.crash(&w.cluster)
			continue
		}
		switch pgtest.Random(w.T).IntN(20) {
		case 0:
			w.faults["locks"].Add(1)
			_ = w.fillLocks(ctx)
			continue
		case 2:
			w.faults["full"].Add(1)
			assert.NoError(w.T, w.disk.fill(time.Duration(pgtest.Random(w.T).Int64N(int64(100*time.Millisecond)))))
			continue
		case 3, 4:
			w.faults["other crashed"].Add(1)
			w.crash(w.other)
			continue
		case 5:
			if len(w.older) > 0 {
				w.faults["client killed"].Add(1)
				w.older[pgtest.Random(w.T).IntN(len(w.older))].kill(false)
				continue
			}
		case 1: // within the tolerance, and now and then beyond it
			w.faults["clock"].Add(1)
			ms := pgtest.Random(w.T).IntN(3000) - 1500
			if pgtest.Random(w.T).IntN(20) == 0 {
				ms += 90_000
			}
			_, _ = w.pool.Exec(ctx, "select setval('stepped.clock', $1)", ms)
			continue
		}
		var pid int
		if err := w.pool.QueryRow(ctx, `select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
			and backend_type = 'client backend' order by xact_start is null, random() limit 1`).Scan(&pid); err != nil {
			continue
		}
		switch pgtest.Random(w.T).IntN(20) {
		case 0: // the postmaster ends all others, too, and recovers
			w.faults["crashed"].Add(1)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		case 1, 2, 3, 4:
			w.faults["stopped"].Add(1)
			if syscall.Kill(pid, syscall.SIGSTOP) == nil {
				time.Sleep(time.Duration(pgtest.Random(w.T).Int64N(int64(100 * time.Millisecond)))) // for so long it does nothing
				_ = syscall.Kill(pid, syscall.SIGCONT)
			}
		default:
			w.faults["killed"].Add(1)
			_, _ = w.pool.Exec(ctx, "select pg_terminate_backend($1)", pid)
		}
	}
}

// more is whether the clients go on: the calls are not made yet, the standby has not taken its place, or no outcome was unknown so far.
func (w *world) more() bool {
	ended := w.ended.Load()
	waits := w.standby != nil && w.faults["promoted"].Load() == 0 || w.unknown.Load() == 0 && ended < 20*w.calls
	return ended < w.calls || waits && !w.T.Failed()
}

// after waits for so many calls.
func (w *world) after(n int64) {
	for until := w.ended.Load() + n; w.ended.Load() < until && w.more(); {
		time.Sleep(time.Millisecond)
	}
}

// crash ends a server, which is down for a while.
func (w *world) crash(c *cluster) {
	assert.NoError(w.T, c.server.Kill())
	if c == w.other {
		w.after(pgtest.Random(w.T).Int64N(20))
	}
	assert.NoError(w.T, c.server.Restart(context.Background()))
}

// replicate starts a standby of the first cluster. Commits wait for one that is synchronous.
func (w *world) replicate() {
	ctx := w.Context()
	var err error
	w.standby, err = pgserver.StartStandby(ctx, w.server, pgserver.Options{Private: true, Durable: true, Settings: map[string]string{"fsync": "off", "wal_retrieve_retry_interval": "100ms"}})
	if errors.Is(err, pgserver.ErrNoBasebackup) {
		w.Skip(err)
	}
	require.NoError(w.T, err)
	w.Cleanup(func() { _ = w.standby.Stop() })
	if w.setting.standby == "sync" {
		_, err = w.pool.Exec(ctx, "alter system set synchronous_standby_names = '"+pgserver.StandbyName+"'")
		require.NoError(w.T, err)
		_, err = w.pool.Exec(ctx, "select pg_reload_conf()")
		require.NoError(w.T, err)
	}
}

// promote ends the primary with calls under way, and the standby takes its place. The process that sends to it is stopped before, so that there
// is something to lose. Nobody leaves meanwhile: Postgres shows a commit that no longer waits for the standby.
func (w *world) promote() {
	ctx := context.Background()
	w.calm.Store(true)
	var sender int
	pgtest.WaitFor(w.T, "the standby to have all", func() bool {
		return w.pool.QueryRow(ctx, "select pid from pg_stat_replication where state = 'streaming' and replay_lsn >= pg_current_wal_flush_lsn()").Scan(&sender) == nil
	})
	w.after(50)
	assert.NoError(w.T, syscall.Kill(sender, syscall.SIGSTOP))
	if w.setting.standby == "sync" {
		pgtest.WaitFor(w.T, "commits to wait for the standby", func() bool {
			var n int
			return w.pool.QueryRow(ctx, "select count(*) from pg_stat_activity where wait_event = 'SyncRep'").Scan(&n) == nil && n > 2
		})
	} else {
		w.after(50)
	}
	assert.NoError(w.T, w.server.Kill())
	standby, err := pgx.Connect(ctx, w.standby.ConnString())
	if assert.NoError(w.T, err) {
		_, err = standby.Exec(ctx, "select pg_promote()")
		assert.NoError(w.T, err)
		w.moved.Store(standby.Config())
		_ = standby.Close(ctx)
	}
	w.server = w.standby
	w.faults["promoted"].Add(1)
	w.calm.Store(false)
}

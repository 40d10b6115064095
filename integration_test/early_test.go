package integration_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

var crashes = flag.Int("crashes", pgtest.Size(3, 10), "how often TestEarlyRelease_… kills the server")

// stall stops a process of a server, for good: of those, SIGKILL ends it.
func stall(t *testing.T, s *system, pidSQL string) {
	t.Helper()
	var pid int
	pgtest.WaitFor(t, "a row of "+pidSQL, func() bool {
		return s.pool.QueryRow(context.Background(), pidSQL).Scan(&pid) == nil
	})
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
}

// begin starts the load of a round. The load ends when the server is gone, and then end returns.
func (s *system) begin(round int, mixed bool) (l *earlyLoad, end func()) {
	l = &earlyLoad{system: s, round: round, mixed: mixed, answered: map[string][]error{}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.run()
	}()
	return l, func() { l.stop.Store(true); <-done }
}

// startForgetful starts a server that has much of its log in memory.
func startForgetful(t *testing.T) *pgserver.Server {
	t.Helper()
	settings := map[string]string{
		"commit_delay": "2000", "commit_siblings": "0", "wal_buffers": "16MB", "wal_writer_delay": "10s",
		"wal_level": "minimal", "max_wal_senders": "0", // the message is logged all the same
	}
	if runtime.GOOS == "linux" {
		settings["recovery_init_sync_method"] = "syncfs" // recovery is most of the test's time
	}
	server, err := pgserver.Start(t.Context(), pgserver.Options{Private: true, Durable: true, Settings: settings})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	return server
}

// kill -9 of every process of the server, many times, while the disk is slow: every acknowledged commit is there, and
// all rows agree with each other.
//
// Such a kill loses the log that the server had in memory and had not yet given to the system. The log writer would
// empty that memory in the background, so it is stopped: only sessions that wait for the log write it.
func TestEarlyRelease_AcknowledgedCommitsSurviveKills(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	server := startForgetful(t)
	s := openChained(t, server.ConnString())
	acked, replays, unknown := 0, 0, 0
	for round := range *crashes {
		stall(t, s, `select pid from pg_stat_activity where backend_type = 'walwriter'`)
		l, end := s.begin(round, round%2 == 0)
		l.waitForAnswers(50 + pgtest.Random(t).IntN(100))
		err := server.Kill()
		end()
		require.NoError(t, err)
		require.NoError(t, server.Restart(t.Context()))
		lost, open := l.judge(s)
		require.Empty(t, lost, "round %d: acknowledged and not there", round)
		s.whole()
		acked, replays, unknown = acked+l.acked, replays+l.replays, unknown+open
	}
	t.Logf("%d kills, %d acknowledged, %d of them replays, %d unknown", *crashes, acked, replays, unknown)
	require.NotZero(t, replays)
	require.NotZero(t, unknown)
	_, err := metered.Do[any](t.Context(), s.c, metered.Command{ID: "after", EarlyRelease: true}, nil)
	require.NoError(t, err)
}

// The same with sessions of one scope: each acknowledged Open has its hold, and each acknowledged Settle, at any isolation level, its
// record.
func TestEarlyRelease_AcknowledgedSessionsSurviveKills(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	server := startForgetful(t)
	s := open(t, server.ConnString(), metered.Config{ResolveTimeout: 300 * time.Millisecond})
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	for round := range max(1, *crashes/3) {
		stall(t, s, `select pid from pg_stat_activity where backend_type = 'walwriter'`)
		var mu sync.Mutex
		opened, settled := map[string]bool{}, map[string]bool{}
		note := func(m map[string]bool, id string) { mu.Lock(); defer mu.Unlock(); m[id] = true }
		session := func(ctx context.Context, id string, i int) error {
			h, err := metered.Open[int](ctx, s.c, metered.Reservation{
				ID: id, EarlyRelease: true, TTL: time.Hour, Isolation: levels[i%3], Note: budget.Note{Reason: id},
				Lines: []holds.Line{{Scope: "all", Amount: 2, Limits: []budget.Limit{budget.Lifetime(1 << 40)}}},
			})
			if err != nil {
				return err
			}
			defer h.Close()
			note(opened, id)
			switch i % 4 {
			case 0: // stays open
			case 1:
				err = h.Cancel(ctx, "")
			default:
				if _, err = h.Settle(ctx, metered.Cost{All: true}, nil); err == nil {
					note(settled, id)
				}
			}
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		var load sync.WaitGroup
		for w := range 8 {
			load.Go(func() {
				for i := 0; ctx.Err() == nil && session(ctx, fmt.Sprintf("%d/%d/%d", round, w, i), i) == nil; i++ {
				}
			})
		}
		enough := 40 + pgtest.Random(t).IntN(60)
		pgtest.WaitFor(t, "sessions to be settled", func() bool { mu.Lock(); defer mu.Unlock(); return len(settled) >= enough })
		err := server.Kill()
		cancel()
		load.Wait()
		require.NoError(t, err)
		require.NoError(t, server.Restart(t.Context()))
		there := func(sql string) []string {
			rows, err := s.pool.Query(t.Context(), sql)
			require.NoError(t, err)
			ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			return ids
		}
		require.Subset(t, there(`select note ->> 'reason' from metered.hold_events where kind = 'h'`), slices.Collect(maps.Keys(opened)), "opened and not there")
		require.Subset(t, there(`select id from metered.operations`), slices.Collect(maps.Keys(settled)), "settled and not there")
		report, err := s.c.Budget.Verify(t.Context(), s.pool, budget.VerifyOptions{})
		require.NoError(t, err)
		require.Empty(t, report.Differences)
		t.Logf("%d sessions opened, %d known to be settled", len(opened), len(settled))
	}
}

// With a synchronous standby, acknowledged means there after the primary is lost and
// the standby promoted. The process that sends to it is stopped a while before, so
// that there is something to lose.
func TestEarlyRelease_AcknowledgedCommitsAreOnTheStandby(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	unknown := 0
	for round := range max(1, *crashes/5) {
		settings := map[string]string{"fsync": "off"} // the machine does not crash
		primary, err := pgserver.Start(ctx, pgserver.Options{Private: true, Durable: true, Settings: settings})
		require.NoError(t, err)
		t.Cleanup(func() { _ = primary.Stop() })
		s := openChained(t, primary.ConnString())
		standby, err := pgserver.StartStandby(ctx, primary, pgserver.Options{Durable: true, Settings: settings})
		if errors.Is(err, pgserver.ErrNoBasebackup) {
			t.Skip(err)
		}
		require.NoError(t, err)
		t.Cleanup(func() { _ = standby.Stop() })
		for _, sql := range []string{`alter system set synchronous_standby_names = '` + pgserver.StandbyName + `'`, `select pg_reload_conf()`} {
			_, err := s.pool.Exec(ctx, sql)
			require.NoError(t, err)
		}
		const sync = `select pid from pg_stat_replication where sync_state = 'sync'`
		pgtest.WaitFor(t, "the standby to be synchronous", func() bool {
			var pid int
			return s.pool.QueryRow(ctx, sync).Scan(&pid) == nil
		})

		l, end := s.begin(round, false) // a plain one would wait with the scope's lock, and all others for it
		l.waitForAnswers(100)
		stall(t, s, sync)
		time.Sleep(100 * time.Millisecond) // for answers that should not come
		err = primary.Kill()
		end()
		require.NoError(t, err)
		promoted := s.on(t, standby.ConnString())
		_, err = promoted.pool.Exec(ctx, `select pg_promote()`)
		require.NoError(t, err)
		lost, open := l.judge(promoted)
		require.Empty(t, lost, "round %d: acknowledged and not there", round)
		promoted.whole()
		t.Logf("round %d: %d acknowledged, %d of them replays, %d unknown", round, l.acked, l.replays, open)
		unknown += open
		require.NoError(t, standby.Stop())
		require.NoError(t, primary.Stop())
	}
	require.NotZero(t, unknown)
}

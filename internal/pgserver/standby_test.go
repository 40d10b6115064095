package pgserver

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func startStandby(t *testing.T, primary *Server, opts Options) *Server {
	t.Helper()
	s, err := StartStandby(t.Context(), primary, opts)
	if errors.Is(err, ErrNoBasebackup) {
		t.Skip(err)
	}
	require.NoError(t, err)
	stopAtEnd(t, s)
	return s
}

// eventually waits for a query to answer that.
func eventually(t *testing.T, s *Server, want, sql string) {
	t.Helper()
	require.Eventually(t, func() bool { return query(t, s, sql) == want }, 2*time.Minute, 10*time.Millisecond, sql)
}

func TestStartStandby_StreamsAndIsPromoted(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]Options{"by its socket": {Durable: true}, "over TCP": {TCP: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary := start(t, opts)
			run(t, primary, "create table kept (i int)")
			opts.Settings = map[string]string{"work_mem": "5MB"}
			standby := startStandby(t, primary, opts)
			require.NotEqual(t, primary.Dir(), standby.Dir())
			require.NotEqual(t, primary.ConnString(), standby.ConnString())
			require.Equal(t, "t", query(t, standby, "select pg_is_in_recovery()"))
			require.Equal(t, "5MB", query(t, standby, "show work_mem"))
			require.Equal(t, query(t, primary, "show fsync"), query(t, standby, "show fsync"))

			run(t, primary, "insert into kept values (1)")
			eventually(t, standby, "1", "select count(*) from kept")
			require.NoError(t, standby.Kill())
			run(t, primary, "insert into kept values (2)")
			require.NoError(t, standby.Restart(t.Context()))
			eventually(t, standby, "2", "select count(*) from kept")

			require.NoError(t, primary.Kill())
			require.Equal(t, "t", query(t, standby, "select pg_promote()"))
			run(t, standby, "insert into kept values (3)")
			require.Equal(t, "3", query(t, standby, "select count(*) from kept"))
		})
	}
}

// The promoted server does not wait for a standby as the primary did.
func TestStartStandby_SynchronousHoldsCommitsUntilItIsThere(t *testing.T) {
	t.Parallel()
	primary := start(t, Options{Durable: true})
	run(t, primary, "create table kept (i int)")
	first := startStandby(t, primary, Options{Durable: true})
	run(t, primary, "alter system set synchronous_standby_names = '"+StandbyName+"'")
	run(t, primary, "select pg_reload_conf()")
	eventually(t, primary, "sync", "select sync_state from pg_stat_replication")
	for range 20 { // each is there when it is acknowledged
		run(t, primary, "insert into kept values (1)")
	}
	second := startStandby(t, primary, Options{Durable: true})
	require.NoError(t, primary.Kill())
	for _, s := range []*Server{first, second} {
		require.Equal(t, "", query(t, s, "show synchronous_standby_names"))
		require.Equal(t, "t", query(t, s, "select pg_promote()"))
		require.Equal(t, "20", query(t, s, "select count(*) from kept"))
		run(t, s, "insert into kept values (2)")
	}
}

func TestStartStandby_IsOfAServerOfOurs(t *testing.T) {
	t.Parallel()
	primary := start(t, Options{})
	other, err := connectTo(t.Context(), primary.ConnString())
	require.NoError(t, err)
	_, err = StartStandby(t.Context(), other, Options{})
	require.ErrorIs(t, err, ErrNotOwned)
	_, err = StartStandby(t.Context(), primary, Options{TCP: true})
	require.ErrorContains(t, err, "TCP")
	if _, err := primary.in.withBasebackup(); err != nil {
		t.Skip(err)
	}
	require.NoError(t, primary.Kill())
	_, err = StartStandby(t.Context(), primary, Options{})
	require.ErrorContains(t, err, "pg_basebackup")
}

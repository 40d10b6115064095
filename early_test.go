package metered_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// slowly is a server of its own, with the schema, on which COMMIT waits for a
// synchronous standby that never comes, until go on is called. watch is a pool that
// only reads.
func slowly(t *testing.T) (pool, watch *pgxpool.Pool, goOn func()) {
	t.Helper()
	ctx := t.Context()
	server, err := pgserver.Start(ctx, pgserver.Options{Private: true, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	open := func() *pgxpool.Pool {
		config, err := pgxpool.ParseConfig(server.ConnString())
		require.NoError(t, err)
		config.MaxConns = 20
		pool, err := pgxpool.NewWithConfig(ctx, config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		return pool
	}
	pool, watch = open(), open()
	_, err = metered.Migrate(ctx, pool, metered.MigrateOptions{River: true})
	require.NoError(t, err)
	_, err = pool.Exec(ctx, `create table uploads (name text primary key)`)
	require.NoError(t, err)
	standbys := func(names string) {
		_, err := watch.Exec(context.Background(), "alter system set synchronous_standby_names = '"+names+"'")
		require.NoError(t, err)
		require.True(t, queryRow[bool](t, watch, "select pg_reload_conf()"))
		require.Eventually(t, func() bool {
			return queryRow[string](t, watch, "show synchronous_standby_names") == names
		}, 20*time.Second, 5*time.Millisecond)
	}
	t.Cleanup(func() { standbys("") })
	standbys("nobody")
	return pool, watch, func() { standbys("") }
}

// waitingForStandby polls until n backends wait for the standby.
func waitingForStandby(t *testing.T, watch *pgxpool.Pool, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return queryRow[int](t, watch, `select count(*) from pg_stat_activity where wait_event = 'SyncRep'`) == n
	}, 20*time.Second, 5*time.Millisecond, "%d do not wait", n)
}

func early(id string) metered.Command {
	return metered.Command{ID: id, EarlyRelease: true, Charges: []budget.Charge{charge("s", 1, 100)}}
}

// Locks are let go of when the commit is in the log; the answer, and any other that
// rests on it, comes when that is durable.
func TestDo_EarlyReleaseLetsGoBeforeItsAnswerIsDurable(t *testing.T) {
	t.Parallel()
	pool, watch, goOn := slowly(t)
	c := newClient(t, pool, metered.Config{})
	ctx := t.Context()
	waiting, answers := 0, make(chan error, 100)
	call := func(f func() error) {
		waiting++
		go func() { answers <- f() }()
		waitingForStandby(t, watch, waiting)
		require.Empty(t, answers)
	}
	do := func(cmd metered.Command, fn metered.Func[uploaded], want error, replayed bool) {
		call(func() error {
			out, err := metered.Do(ctx, c, cmd, fn)
			if !errors.Is(err, want) || out.Replayed != replayed {
				return fmt.Errorf("%s: %v, replayed: %v", cmd.ID, err, out.Replayed)
			}
			return nil
		})
	}
	do(early("a"), upload("a"), nil, false)
	do(early("b"), upload("b"), nil, false) // on the same scope
	require.Equal(t, 2, count(t, watch, "uploads"))
	require.Equal(t, int64(2), used(t, watch, c, "s"))

	plain := early("a")
	plain.EarlyRelease = false
	do(early("a"), mustNotRun(t), nil, true)
	do(plain, mustNotRun(t), nil, true)
	other := early("a")
	other.Name = "other"
	do(other, mustNotRun(t), metered.ErrConflict, false)
	for _, want := range []error{nil, metered.ErrConflict} {
		call(func() error { // the caller's COMMIT waits, though all that it did was read
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				cmd := plain
				if want != nil {
					cmd.Name = "other"
				}
				if _, err := metered.DoTx(ctx, c, tx, cmd, mustNotRun(t)); !errors.Is(err, want) {
					return fmt.Errorf("in a transaction: %v", err)
				}
				return nil
			})
		})
	}

	// A refusal promises nothing, and waits for nothing.
	full := early("full")
	full.Charges[0].Amount = 1000
	_, err := metered.Do(ctx, c, full, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrExceeded)

	plain.ID = "c"
	do(plain, upload("c"), nil, false)
	require.Equal(t, 2, count(t, watch, "uploads"), "without early release it is not seen either")
	goOn()
	for range waiting {
		require.NoError(t, <-answers)
	}
	require.Equal(t, 3, count(t, watch, "uploads"))
}

// The barrier waits as the session would, or as the default does where the session
// does not wait.
func TestDo_EarlyReleaseWaitsForWhatTheSessionWaitsFor(t *testing.T) {
	t.Parallel()
	pool, watch, goOn := slowly(t)
	answers := make(chan error, 10)
	for i, level := range []string{"on", "remote_write", "remote_apply", "off"} {
		c := newClient(t, pgtest.Reopen(t, pool, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["synchronous_commit"] = level
		}), metered.Config{})
		go func() {
			_, err := metered.Do(t.Context(), c, early(level), upload(level))
			answers <- err
		}()
		waitingForStandby(t, watch, i+1)
		require.Empty(t, answers)
	}
	local := pgtest.Reopen(t, pool, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["synchronous_commit"] = "local" })
	_, err := metered.Do(t.Context(), newClient(t, local, metered.Config{}), early("local"), upload("local"))
	require.NoError(t, err)
	require.Equal(t, 5, count(t, watch, "uploads"))
	require.Equal(t, "local", queryRow[string](t, local, "show synchronous_commit"))
	goOn()
	for range 4 {
		require.NoError(t, <-answers)
	}
}

// COMMIT has taken effect, and then the way to the answer is cut: it is not known
// whether it lasts.
func TestDo_EarlyReleaseSeenButNotKnownToBeDurableIsIndefinite(t *testing.T) {
	t.Parallel()
	pool, watch, goOn := slowly(t)
	c := newClient(t, pool, metered.Config{})
	for _, fn := range []metered.Func[uploaded]{upload("a"), mustNotRun(t)} { // the second is a replay
		ctx, cancel := context.WithCancel(t.Context())
		answer := make(chan error, 1)
		go func() {
			_, err := metered.Do(ctx, c, early("a"), fn)
			answer <- err
		}()
		waitingForStandby(t, watch, 1)
		require.Equal(t, 1, count(t, watch, "uploads"))
		cancel()
		require.ErrorIs(t, <-answer, metered.ErrIndefinite)
		waitingForStandby(t, watch, 0) // pgx has its wait cancelled
	}
	goOn()
	out, err := metered.Do(t.Context(), c, early("a"), mustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
}

func TestDoTx_RefusesWhatIsAboutACommit(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for field, cmd := range map[string]metered.Command{
			"Command.EarlyRelease": {ID: "a", EarlyRelease: true}, "Command.LSN": {ID: "a", LSN: true},
		} {
			_, err := metered.DoTx(t.Context(), c, tx, cmd, mustNotRun(t))
			var argument *metered.ArgumentError
			require.ErrorAs(t, err, &argument)
			require.Equal(t, field, argument.Field)
		}
		return nil
	}))
}

// A replay in a transaction that may not write, since it writes no row.
func TestDoTx_ReplaysInAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := metered.Command{ID: "a"}
	_, err := metered.Do(t.Context(), c, cmd, upload("a"))
	require.NoError(t, err)
	require.NoError(t, pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		out, err := metered.DoTx(t.Context(), c, tx, cmd, mustNotRun(t))
		require.True(t, out.Replayed)
		return err
	}))
}

package command_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/observe"
)

// A program may give its connections types of its own, which cannot read what the library reads. Such an answer is that of a commit, and not
// one whose outcome is unknown.
func TestDo_AnAnswerThatCannotBeReadIsNoUnknownCommit(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
		c.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
			conn.TypeMap().RegisterType(&pgtype.Type{Name: "_int8", OID: pgtype.Int8ArrayOID, Codec: pgtype.BoolCodec{}})
			return nil
		}
	})
	events := &pgtest.Recorder{}
	c := newClient(t, pool, metered.Config{Config: budget.Config{Observer: events}})
	cmd := metered.Command{ID: "op", EarlyLook: true, Charges: []budget.Charge{charge("s", 1, 0), charge("t", 1, 0)}}
	for _, what := range []string{"first", "replay"} {
		_, err := metered.Do(t.Context(), c, cmd, upload("a"))
		require.Equal(t, "answer_unreadable", metered.Code(err), "%s: %v", what, err)
		require.False(t, metered.Retryable(err))
		require.Equal(t, 1, count(t, owner, "metered.operations"), what)
		require.Equal(t, 2, count(t, owner, "metered.ledger"), what)
	}
	_, err := c.Budget.ChargeNow(t.Context(), pool, budget.Charge{
		Scope: "now", Amount: 1, Limits: []budget.Limit{budget.Lifetime(9), budget.PerWindow(9, time.Hour), budget.PerWindow(9, time.Minute)},
	})
	require.Equal(t, "answer_unreadable", metered.Code(err), "%v", err)
	require.Equal(t, 3, count(t, owner, "metered.ledger"))
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = metered.DoTx(t.Context(), c, tx, metered.Command{ID: "lent", Charges: cmd.Charges}, upload("b"))
	require.Error(t, err)
	require.Error(t, tx.Commit(t.Context()), "what the command did cannot be taken back, so it must not be committed")
	require.Equal(t, 1, count(t, owner, "metered.operations"))
	require.Zero(t, events.Sum(observe.Commit))
}

// A cancel request ends a COMMIT's wait for a synchronous standby, and Postgres answers it by its tag. With pgx's handler that sends one, the
// answer to a caller who left meanwhile is that the outcome is unknown.
func TestCommit_CancelledWhileItWaitsForAStandbyIsUnknown(t *testing.T) {
	t.Parallel()
	owner, watch, standbyComes := pgtest.SlowCommits(t)
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: time.Minute}
		}
	})
	c := newClient(t, pool, metered.Config{})
	insert := func(ctx context.Context, tx pgx.Tx, id string) error {
		_, err := tx.Exec(ctx, "insert into uploads values ($1)", id)
		return err
	}
	for _, one := range []struct {
		what string
		call func(ctx context.Context) error
	}{
		{"Do", func(ctx context.Context) error {
			_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{charge("s", 1, 0)}}, upload("Do"))
			return err
		}},
		{"Do, EarlyRelease", func(ctx context.Context) error {
			_, err := metered.Do(ctx, c, metered.Command{ID: "early", EarlyRelease: true}, upload("Do, EarlyRelease"))
			return err
		}},
		{"Do, a replay", func(ctx context.Context) error {
			_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{charge("s", 1, 0)}}, upload("a"))
			return err
		}},
		{"RunTx", func(ctx context.Context) error {
			return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error { return insert(ctx, tx, "RunTx") })
		}},
		{"ChargeNow", func(ctx context.Context) error {
			_, err := c.Budget.ChargeNow(ctx, pool, charge("now", 1, 0))
			return err
		}},
	} {
		what, call := one.what, one.call
		ctx, cancel := context.WithCancel(t.Context())
		answer := pgtest.Going(func() error { return call(ctx) })
		pgtest.WaitFor(t, what+" waits for the standby", func() bool {
			return pgtest.Value[bool](t, watch, "select exists (select from pg_stat_activity where wait_event = 'SyncRep')")
		})
		cancel()
		err := <-answer
		require.True(t, errors.Is(err, metered.ErrIndefinite) || errors.Is(err, budget.ErrCommitUnknown), "%s: %v", what, err)
	}
	standbyComes()
	require.Equal(t, 3, count(t, owner, "uploads"))
}

// The first command of each connection after a migration of the caller's own table runs again, on its prepared statement made anew.
func TestDo_RunsAgainWhereATableChangedItsType(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) { c.MaxConns = 1 })
	c := newClient(t, pool, metered.Config{})
	var runs int
	read := func(ctx context.Context, tx pgx.Tx) error {
		runs++
		rows, err := tx.Query(ctx, "select * from uploads")
		if err != nil {
			return err
		}
		rows.Close()
		return rows.Err()
	}
	do := func(id string) error {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: id}, func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, read(ctx, tx) })
		return err
	}
	require.NoError(t, do("before"))
	pgtest.Execute(t, owner, "alter table uploads add more int")
	require.NoError(t, do("after"))
	require.Equal(t, 3, runs)
	pgtest.Execute(t, owner, "alter table uploads add still_more int")
	require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, read))
	require.Equal(t, 5, runs)
	pgtest.Execute(t, owner, "alter table uploads add yet_more int")
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return read(t.Context(), tx) })
	require.True(t, metered.Retryable(err), "%v", err)
}

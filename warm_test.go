package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// On a connection that was warmed the first calls send no more flushes than later ones: all their statements are prepared.
// Nothing of the warming is left in the database.
func TestWarm_TheFirstCallsOfAConnectionPrepareNothing(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	flushes := func(warm bool) (n []int) {
		pool, w := pgtest.Tap(t, owner, func(c *pgxpool.Config) {
			c.MaxConns = 1
			if warm {
				c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return metered.Warm(ctx, conn, "") }
			}
		})
		c := pgtest.NewClient(t, pool, metered.Config{})
		require.NoError(t, pgtest.Do(t, c, metered.NewID())) // the look at the schema is the client's, and once
		for range 2 {
			for _, call := range []func(){
				func() {
					r := stream(metered.NewID())
					r.Lines[0].Amount = 1
					s, err := metered.Open[usage](t.Context(), c, r)
					require.NoError(t, err)
					s.Close()
				},
				func() {
					_, err := metered.Do[any](t.Context(), c, metered.Command{ID: metered.NewID(), Holds: []holds.Placement{{Lines: []holds.Line{{Scope: "seats", Amount: 1}}, TTL: time.Minute}}}, nil)
					require.NoError(t, err)
				},
			} {
				pool.Reset()
				require.NoError(t, pool.Ping(t.Context()))
				w.Each(nil)
				call()
				first := len(w.Sent())
				w.Each(nil)
				call()
				n = append(n, first-len(w.Sent()))
			}
		}
		return n
	}
	before := pgtest.Count(t, owner, "metered.holds")
	require.Equal(t, []int{0, 0, 0, 0}, flushes(true))
	require.Equal(t, before+8, pgtest.Count(t, owner, "metered.holds"))
	require.Zero(t, pgtest.Count(t, owner, "metered.ledger where scope like 'metered/warm/%'"))
	for _, n := range flushes(false) {
		require.Positive(t, n, "without it they are prepared by the first call")
	}
}

// A connection is made where there is no schema yet, and for a role without rights: Migrate and GrantSQL come later.
func TestWarm_IsNoErrorWhereTheCallsWouldFail(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true, Config: func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return metered.Warm(ctx, conn, "") }
	}})
	require.NoError(t, pool.Ping(t.Context()))
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	require.ErrorIs(t, metered.Warm(t.Context(), nil, ""), budget.ErrArgument)
	require.ErrorIs(t, metered.Warm(t.Context(), conn.Conn(), "Not a schema!\x00"), budget.ErrArgument)
	require.NoError(t, conn.Conn().Close(t.Context()))
	require.ErrorContains(t, metered.Warm(t.Context(), conn.Conn(), ""), "conn closed")
}

// With pgx's handler that sends a cancel request, calls that are cancelled while the server works keep their connection, and
// are known to have committed nothing.
func TestCancelRequest_ACancelledCallKeepsItsConnection(t *testing.T) {
	t.Parallel()
	owner, lockers := pgtest.SetUp(t, metered.Config{})
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: time.Minute}
		}
	})
	c := pgtest.NewClient(t, pool, metered.Config{})
	require.NoError(t, pgtest.Do(t, c, "first"))
	pid := pgtest.Value[int](t, pool, "select pg_backend_pid()")
	for what, call := range map[string]func(ctx context.Context) error{
		"Open": func(ctx context.Context) error {
			_, err := metered.Open[usage](ctx, c, stream("1"))
			return err
		},
		"Do": func(ctx context.Context) error {
			_, err := metered.Do[any](ctx, c, metered.Command{ID: "1", Charges: []budget.Charge{pgtest.Charge("tokens", 1, 0)}}, nil)
			return err
		},
		"ChargeNow": func(ctx context.Context) error {
			_, err := c.Budget.ChargeNow(ctx, pool, pgtest.Charge("tokens", 1, 0))
			return err
		},
	} {
		release := pgtest.LockScope(t, owner, lockers, "tokens")
		ctx, cancel := context.WithCancel(t.Context())
		answer := pgtest.Going(func() error { return call(ctx) })
		pgtest.WaitQueued(t, owner, 1)
		cancel()
		err := <-answer
		require.ErrorContains(t, err, "57014", what)
		require.NotErrorIs(t, err, metered.ErrIndefinite, what)
		require.NotErrorIs(t, err, budget.ErrCommitUnknown, what)
		release()
		require.Equal(t, pid, pgtest.Value[int](t, pool, "select pg_backend_pid()"), what)
		require.Equal(t, [2]int64{0, 0}, stands(t, owner, c, "tokens"), what)
	}
}

// Postgres ends every connection of the pool between two calls: a restart, a failover, an operator. Nothing was done on them,
// so each call goes on with a new one, and its caller sees no error.
func TestConnectionsThatEndedInThePoolAreNoErrorOfTheNextCall(t *testing.T) {
	t.Parallel()
	const conns = 4
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) { c.MaxConns = conns })
	c := pgtest.NewClient(t, pool, metered.Config{MaxAttempts: 1})
	end := func() {
		var all []*pgxpool.Conn
		for range conns {
			conn, err := pool.Acquire(t.Context())
			require.NoError(t, err)
			all = append(all, conn)
			_, err = owner.Exec(t.Context(), "select pg_terminate_backend($1, 100000)", conn.Conn().PgConn().PID())
			require.NoError(t, err)
		}
		for _, conn := range all {
			conn.Release()
		}
	}
	for what, call := range map[string]func() error{
		"Do": func() error { return pgtest.Do(t, c, "op") },
		"sticky": func() error {
			_, err := metered.Do[any](t.Context(), c, metered.Command{ID: "sticky", Sticky: []budget.Charge{{Scope: "tries", Amount: 1}}}, nil)
			return err
		},
		"RunTx": func() error {
			return c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error { return nil })
		},
		"Open": func() error {
			s, err := metered.Open[usage](t.Context(), c, stream("1"))
			if err == nil {
				end()
				err = s.Cancel(t.Context(), "not needed")
			}
			return err
		},
		"Open, asking for a limit": func() error {
			r := stream("2")
			r.Lines[0].Limits = []budget.Limit{budget.Lifetime(100).MaxFrom("select 1000")}
			s, err := metered.Open[usage](t.Context(), c, r)
			if err == nil {
				s.Close()
			}
			return err
		},
	} {
		end()
		require.NoError(t, call(), what)
	}
	require.Equal(t, 1, pgtest.Count(t, owner, "metered.operations where id = 'op'"))
}

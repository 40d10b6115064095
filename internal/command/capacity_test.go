package command_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
)

// hall is a table of capacities, of which the hall "h" has some.
func hall(t *testing.T, pool *pgxpool.Pool, seats int64) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `create table halls (id text primary key, seats bigint); grant all on halls to public`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `insert into halls values ('h', $1)`, seats)
	require.NoError(t, err)
}

// seatsOf is the limit that the table says.
var seatsOf = []budget.Limit{budget.Lifetime(0).Named("seats").MaxFrom(`select seats from halls where id = $1 for share`, "h")}

// ways are those to take one seat whose capacity is computed.
var ways = map[string]func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error{
	"Command.Charges": func(ctx context.Context, _ *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error {
		_, err := metered.Do[any](ctx, c, metered.Command{ID: id, Isolation: level, Charges: []budget.Charge{{Scope: "hall", Amount: 1, Limits: seatsOf}}}, nil)
		return err
	},
	"Command.Holds": func(ctx context.Context, _ *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error {
		_, err := metered.Do[any](ctx, c, metered.Command{ID: id, Isolation: level, Holds: []holds.Placement{
			{TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: seatsOf}, room("other", 1, 1000)}}}}, nil)
		return err
	},
	"Tx.Charge": func(ctx context.Context, _ *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: id, Input: 1, Isolation: level}, func(_ context.Context, tx *metered.Tx) (any, error) {
			return nil, tx.Charge(budget.Charge{Scope: "hall", Amount: 1, Limits: seatsOf})
		})
		return err
	},
	"Tx.Place": func(ctx context.Context, _ *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: id, Input: 1, Isolation: level}, pgtest.Placing(
			holds.Placement{TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: seatsOf}}}))
		return err
	},
	"Open":         opening(seatsOf),
	"Open, a look": opening([]budget.Limit{budget.Lifetime(0).Named("seats").MaxFrom(`select seats from halls where id = $1`, "h")}),
	"Ledger.Charge": func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, _ string, level pgx.TxIsoLevel) error {
		return pgtest.Retried(ctx, pool, level, func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "hall", Amount: 1, Limits: seatsOf})
			return err
		})
	},
	"Book.Place": func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, _ string, level pgx.TxIsoLevel) error {
		return pgtest.Retried(ctx, pool, level, func(tx pgx.Tx) error {
			_, err := c.Holds.Place(ctx, tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: seatsOf}}})
			return err
		})
	},
	"DoTx": func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error {
		return pgtest.Retried(ctx, pool, level, func(tx pgx.Tx) error {
			_, err := metered.DoTx[any](ctx, c, tx, metered.Command{ID: id, Charges: []budget.Charge{{Scope: "hall", Amount: 1, Limits: seatsOf}}}, nil)
			return err
		})
	},
}

// opening opens a session of one seat, whose hold stays.
func opening(limits []budget.Limit) func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error {
	return func(ctx context.Context, _ *pgxpool.Pool, c *metered.Client, id string, level pgx.TxIsoLevel) error {
		s, err := metered.Open[any](ctx, c, metered.Reservation{ID: id, Isolation: level, TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: limits}}})
		if err == nil {
			s.Close()
		}
		return err
	}
}

// A capacity that is lowered while a call waits for the scope counts: nobody is let in by the one before.
func TestCapacity_LoweredWhileACallWaitsForTheLockIsTheOneThatCounts(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{EarlyLook: true})
	ctx := t.Context()
	hall(t, pool, 0)
	taken := 0
	for name, take := range ways {
		for _, level := range isolationLevels {
			t.Run(name+", "+string(level), func(t *testing.T) {
				take := func(id string) error { return take(ctx, pool, c, t.Name()+id, level) }
				set := func(seats int) {
					_, err := pool.Exec(ctx, `update halls set seats = $1`, seats)
					require.NoError(t, err)
				}
				set(taken + 2)
				require.NoError(t, take("first"))
				taken++
				unlock := lockScope(t, pool, c, "hall")
				late := pgtest.Going(func() error { return take("late") })
				pgtest.WaitAdvisory(t, pool, 1)
				set(taken)
				unlock()
				var exceeded *budget.ExceededError
				require.ErrorAs(t, <-late, &exceeded)
				require.EqualValues(t, taken, exceeded.Refusals[0].Limit.Max)
				require.Equal(t, "seats", exceeded.Refusals[0].Limit.Name)

				set(taken + 1)
				require.NoError(t, take("raised"), "the early look leaves the limit out")
				taken++
				require.ErrorIs(t, take("full"), budget.ErrExceeded)
			})
		}
	}
}

// A session and a command ask for a limit before they have the scope, and once more in the flush that takes the lock and
// commits: no other caller waits for an answer's way to the program and back. After two answers alike they ask in that
// flush alone, which is the session's only one. A query that is no part of another one is asked under the lock alone.
func TestCapacity_OfASessionOrACommandIsAskedBeforeTheLock(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool, wire := pgtest.Tap(t, owner, nil)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	_, err = owner.Exec(t.Context(), `create table asked (no bigserial, locks int); create table seat (n int); insert into seat values (100);
		create function seats() returns int language sql as $$
			insert into asked (locks) select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid();
			select n from seat $$`)
	require.NoError(t, err)
	for name, take := range map[string]func(id string, limits []budget.Limit) error{
		"Open": func(id string, limits []budget.Limit) error {
			s, err := metered.Open[any](t.Context(), c, metered.Reservation{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: limits}}})
			if err == nil {
				s.Close()
			}
			return err
		},
		"Do": func(id string, limits []budget.Limit) error {
			_, err := metered.Do[any](t.Context(), c, metered.Command{ID: id, Charges: []budget.Charge{{Scope: "hall", Amount: 1, Limits: limits}}},
				func(context.Context, *metered.Tx) (any, error) { return nil, nil })
			return err
		},
	} {
		set := func(n int) { _, err := owner.Exec(t.Context(), "update seat set n = $1", n); require.NoError(t, err) }
		asks := func(id, sql string) ([]int32, error) {
			var committing atomic.Int32
			wire.Once(func(f *pgtest.Flush) bool { return f.Has("seats()") && f.Has("commit") }, func(*pgtest.Flush) { committing.Add(1) })
			err := take(name+id, []budget.Limit{budget.Lifetime(0).MaxFrom(sql)})
			if sql == "select seats()" {
				require.EqualValues(t, 1, committing.Load(), name+id)
			}
			return pgtest.Value[[]int32](t, owner, "with x as (delete from asked returning *) select array_agg(locks order by no) from x"), err
		}
		set(100)
		for _, id := range []string{"1", "2"} {
			locks, err := asks(id, "select seats()")
			require.NoError(t, err)
			require.Equal(t, []int32{1, 2}, locks, "the operation's lock, and the scope's")
		}
		locks, err := asks("3", "select seats()")
		require.NoError(t, err)
		require.Equal(t, []int32{2}, locks)
		_, err = metered.Do[any](t.Context(), c, metered.Command{ID: name, Input: 1, Isolation: pgx.RepeatableRead,
			Charges: []budget.Charge{{Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom("select seats()")}}}}, nil)
		require.ErrorIs(t, err, fault.New("limit_query", ""), "there it would look at its own snapshot")
		set(1)
		_, err = asks("4", "select seats()")
		require.ErrorIs(t, err, budget.ErrExceeded, "an answer that has changed counts")
		set(90)
		_, err = asks("5", "select seats()")
		require.NoError(t, err)
		locks, err = asks("6", "select seats();")
		require.NoError(t, err)
		require.Equal(t, []int32{2}, locks, "of its last attempt")
	}
}

// A column says what was granted, and what is left is that less the use. Who sets the balance under the
// scope's lock is right, though a charge comes meanwhile.
func TestCapacity_AColumnOfWhatWasGrantedIsTheLimit(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := pool.Exec(ctx, `create table users (name text primary key, quota bigint); insert into users values ('ann', 100)`)
	require.NoError(t, err)
	charge := func(units int64) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "credit/ann", Amount: units, Limits: []budget.Limit{
				budget.Lifetime(0).MaxFrom(`select quota from users where name = $1 for share`, "ann")}})
			return err
		})
	}
	require.NoError(t, charge(30))
	sets, err := pool.Begin(ctx)
	require.NoError(t, err)
	require.NoError(t, c.Budget.Lock(ctx, sets, "credit/ann"))
	used, err := c.Budget.Usage(ctx, sets, budget.Query{Scope: "credit/ann"})
	require.NoError(t, err)
	late := pgtest.Going(func() error { return charge(11) })
	pgtest.WaitAdvisory(t, pool, 1)
	_, err = sets.Exec(ctx, `update users set quota = $1 where name = 'ann'`, used[0].Used+10)
	require.NoError(t, err)
	require.NoError(t, sets.Commit(ctx))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, <-late, &exceeded)
	require.EqualValues(t, 10, exceeded.Refusals[0].Available)
	require.NoError(t, charge(10))
	_, err = pool.Exec(ctx, `update users set quota = quota + 5`)
	require.NoError(t, err)
	require.NoError(t, charge(5))
	require.ErrorIs(t, charge(1), budget.ErrExceeded)
}

// Under load, with a capacity that moves, never more is taken than it allows at the time.
func TestCapacity_ThatMovesIsNeverPassed(t *testing.T) {
	t.Parallel()
	const callers = 6
	pool, c := setUp(t, metered.Config{MaxAttempts: 100}, pgtest.Options{MaxConns: callers + 1})
	ctx := t.Context()
	hall(t, pool, 0)
	var taken atomic.Int64
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			for round := range pgtest.Size(4, 8) {
				// Raised by five and, while callers come, lowered to two more than are taken.
				_, err := pool.Exec(ctx, `update halls set seats = $1`, taken.Load()+5)
				require.NoError(t, err)
				least := taken.Load() + 2
				atOnce(callers+1, func(i int) {
					if i == callers {
						// The caller that lowers it reads the taken seats under the lock.
						err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
							if err := c.Budget.Lock(ctx, tx, "hall"); err != nil {
								return err
							}
							_, err := tx.Exec(ctx, `update halls set seats = greatest($1, coalesce((select spent from metered.ledger where scope = 'hall' order by seq desc limit 1), 0))`, least)
							return err
						})
						if err != nil {
							t.Errorf("%v", err)
						}
						return
					}
					switch err := ways["Command.Charges"](ctx, pool, c, fmt.Sprint(level, round, "/", i), level); metered.Code(err) {
					case "":
						require.NoError(t, err)
						taken.Add(1)
					case "budget_exceeded":
					default:
						t.Errorf("%v", err)
					}
				})
				seats := pgtest.Value[int64](t, pool, `select seats from halls`)
				require.Equal(t, taken.Load(), seats, "as many as there are in the end, and no more")
				require.Equal(t, taken.Load(), used(t, pool, c, "hall"))
			}
		})
	}
}

// A query that locks a row meets the same errors there as any other statement.
func TestCapacity_AQueryThatWaitsInVainIsBusy(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	hall(t, pool, 4)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(ctx, "update halls set seats = 3")
	require.NoError(t, err)
	limits := []budget.Limit{budget.Lifetime(0).MaxFrom("select seats from halls for share nowait")}
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{{Scope: "hall", Amount: 1, Limits: limits}}}, nil)
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NotErrorIs(t, err, fault.New("limit_query", ""))
	require.True(t, metered.Retryable(err))
}

func TestCapacity_AQueryThatDoesNotAnswerIsAnError(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	hall(t, pool, 4)
	for sql, text := range map[string]string{
		"select seats from halls where id = 'none'": "answered nothing",
		"select null::bigint":                       "answered nothing",
		"select -1::bigint":                         "-1 is not from 0",
		"select seats from nowhere":                 "nowhere",
		"commit":                                    "not complete",
		"select v from (values (7), (0)) t(v)":      "too many rows",
		"select 'abc'::bigint":                      "abc",
		"select 'abc'":                              "cannot scan text",
	} {
		limits := []budget.Limit{budget.Lifetime(0).MaxFrom(sql)}
		_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{{Scope: "hall", Amount: 1, Limits: limits}}}, nil)
		require.ErrorIs(t, err, fault.New("limit_query", ""), sql)
		require.ErrorContains(t, err, text)
		require.False(t, metered.Retryable(err))
	}
	two := []budget.Charge{{Scope: "fine", Amount: 1, Limits: seatsOf}, {Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom("select seats from nowhere")}}}
	_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: two}, nil)
	require.ErrorIs(t, err, fault.New("limit_query", ""))
	require.ErrorContains(t, err, "or of another limit")
	// Above READ COMMITTED a query that locks nothing answers from before the locks.
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op", Isolation: pgx.RepeatableRead, Charges: []budget.Charge{
		{Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom("select seats from halls")}}}}, nil)
	require.ErrorIs(t, err, fault.New("limit_query", ""))
	require.ErrorContains(t, err, "FOR SHARE")
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{
		{Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom(" ")}}}}, nil)
	require.ErrorIs(t, err, budget.ErrArgument)
	require.Zero(t, count(t, pool, "metered.ledger"))

	_, err = c.Budget.Check(ctx, pool, budget.Charge{Scope: "hall", Amount: 1, Limits: []budget.Limit{
		budget.Lifetime(0).MaxFrom("select v from (values (7), (0)) t(v)")}})
	require.ErrorIs(t, err, fault.New("limit_query", ""))
	receipt, err := c.Budget.Check(ctx, pool, budget.Charge{Scope: "hall", Amount: 4, Limits: seatsOf})
	require.NoError(t, err)
	require.EqualValues(t, 0, receipt.Entries[0].Standings[0].Available)
	_, err = c.Budget.Check(ctx, pool, budget.Charge{Scope: "hall", Amount: 5, Limits: seatsOf})
	require.ErrorIs(t, err, budget.ErrExceeded)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, Over: holds.OverIfFits, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: seatsOf}}})
		return err
	})
	require.ErrorIs(t, err, budget.ErrArgument)
}

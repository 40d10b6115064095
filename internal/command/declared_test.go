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
	"github.com/pgmetered/metered/internal/pgtest"
)

func seat(number, holder string) holds.Claim {
	return holds.Claim{Tenant: "hall", Key: holds.Key{Type: "seat", Value: number}, Holder: holder, TTL: time.Minute}
}

// The hold of seat 21A is no answer to who asks for 22B under the same id, in any of the ways to ask.
func TestCommand_TheSameIDForAnotherHoldIsAConflict(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			_, c := setUp(t, metered.Config{})
			ctx := t.Context()
			first := metered.Command{
				ID: "op", Isolation: level,
				Claims: []holds.Claim{seat("21A", "ann")},
				Holds:  []holds.Request{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 2, 9)}}},
			}
			out, err := metered.Do[any](ctx, c, first, nil)
			require.NoError(t, err)
			require.Equal(t, []string{"power", "claim"}, []string{out.Holds[0].Lines[0].Scope, out.Holds[1].Lines[0].Scope[:5]})
			same := first
			same.Claims = []holds.Claim{seat("21A", "ann")}
			same.Claims[0].TTL = time.Hour // when it ends, and how much there is, may change between the calls
			same.Holds = []holds.Request{{Holder: "ann", TTL: time.Hour, Lines: []holds.Line{room("power", 2, 5)}}}
			again, err := metered.Do[any](ctx, c, same, nil)
			require.NoError(t, err)
			require.True(t, again.Replayed)
			require.Equal(t, out.Holds, again.Holds)

			for name, change := range map[string]func(*metered.Command){
				"another seat":   func(cmd *metered.Command) { cmd.Claims = []holds.Claim{seat("22B", "ann")} },
				"another holder": func(cmd *metered.Command) { cmd.Claims = []holds.Claim{seat("21A", "ben")} },
				"another tenant": func(cmd *metered.Command) { cmd.Claims = []holds.Claim{seat("21A", "ann")}; cmd.Claims[0].Tenant = "" },
				"no claim":       func(cmd *metered.Command) { cmd.Claims = nil },
				"one claim more": func(cmd *metered.Command) { cmd.Claims = append(cmd.Claims[:1:1], seat("22B", "ann")) },
				"another amount": func(cmd *metered.Command) {
					cmd.Holds = []holds.Request{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 3, 9)}}}
				},
				"another scope": func(cmd *metered.Command) {
					cmd.Holds = []holds.Request{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("water", 2, 9)}}}
				},
				"an id": func(cmd *metered.Command) {
					cmd.Holds = []holds.Request{{ID: "h", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 2, 9)}}}
				},
				"a charge with it": func(cmd *metered.Command) {
					cmd.Holds = []holds.Request{{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{room("power", 2, 9)}, Charges: []budget.Charge{charge("fee", 1, 0)}}}
				},
			} {
				cmd := first
				change(&cmd)
				_, err := metered.Do[any](ctx, c, cmd, nil)
				require.ErrorIs(t, err, metered.ErrConflict, name)
			}
		})
	}
}

// Input stands for the holds, charges and other calls of a function: without an Input they are refused, and the same
// id with another Input is a conflict.
func TestTx_CallsOfTheFunctionNeedAnInput(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for name, call := range map[string]func(ctx context.Context, tx *metered.Tx) error{
		"Place": func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Place(ctx, holds.Request{TTL: time.Minute, Lines: []holds.Line{room("a", 1, 9)}}, nil)
			return err
		},
		"Claim": func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Claim(ctx, seat("21A", "ann"), nil)
			return err
		},
		"Capture": func(_ context.Context, tx *metered.Tx) error {
			return tx.Capture(holds.Capture{IDs: []string{"h"}, All: true})
		},
		"Release": func(_ context.Context, tx *metered.Tx) error { return tx.Release(holds.Release{IDs: []string{"h"}}) },
		"Extend": func(_ context.Context, tx *metered.Tx) error {
			return tx.Extend(holds.Extend{IDs: []string{"h"}, By: time.Second})
		},
		"Return": func(_ context.Context, tx *metered.Tx) error {
			return tx.Return(holds.Return{IDs: []string{"h"}, All: true})
		},
		"Charge": func(_ context.Context, tx *metered.Tx) error { return tx.Charge(charge("a", 1, 0)) },
		"Credit": func(_ context.Context, tx *metered.Tx) error { return tx.Credit(budget.Credit{Scope: "a", Amount: 1}) },
		"Refund": func(_ context.Context, tx *metered.Tx) error {
			return tx.Refund(budget.Refund{Scope: "a", Seq: 1, Amount: 1})
		},
	} {
		_, err := metered.Do(ctx, c, metered.Command{ID: name}, func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, call(ctx, tx) })
		var argument *metered.ArgumentError
		require.ErrorAs(t, err, &argument, name)
		require.Equal(t, "Command.Input", argument.Field, name)
	}
	require.Zero(t, count(t, pool, "metered.operations"))

	claim := func(number string) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: number}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			return tx.Claim(ctx, seat(number, "ann"), nil)
		})
		return err
	}
	require.NoError(t, claim("21A"))
	require.ErrorIs(t, claim("22B"), metered.ErrConflict)
}

// A command that declares its holds is refused before its function runs, in the flush that begins it.
func TestCommand_DeclaredHoldsAreLookedAtEarly(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	one := func(holder string) []holds.Request {
		return []holds.Request{{ID: "h", Holder: holder, TTL: time.Minute, Lines: []holds.Line{room("stock", 1, 1)}}}
	}
	for i, holder := range []string{"ann", "ann"} { // her own hold is not in her way
		out, err := metered.Do[any](ctx, c, metered.Command{ID: fmt.Sprint(i), Holds: one(holder), Claims: []holds.Claim{seat("21A", holder)}}, nil)
		require.NoError(t, err)
		require.Equal(t, i == 0, out.Holds[0].Created)
	}
	for name, cmd := range map[string]metered.Command{
		"refused":        {Holds: []holds.Request{{TTL: time.Minute, Lines: []holds.Line{room("stock", 1, 1)}}}},
		"taken":          {Claims: []holds.Claim{seat("21A", "ben")}},
		"taken, sticky":  {Claims: []holds.Claim{seat("21A", "ben")}, Sticky: tries},
		"the line of it": {Claims: []holds.Claim{{Key: holds.Key{Type: "seat", Value: "23C"}, Holder: "ben", TTL: time.Minute, Lines: []holds.Line{room("stock", 1, 1)}}}},
	} {
		cmd.ID = name
		_, err := metered.Do(ctx, c, cmd, mustNotRun(t))
		late := func(ctx context.Context, tx *metered.Tx) (s string, err error) {
			for _, r := range cmd.Holds {
				s, err = tx.Place(ctx, r, nil)
			}
			for _, r := range cmd.Claims {
				s, err = tx.Claim(ctx, r, nil)
			}
			return s, err
		}
		_, lateErr := metered.Do(ctx, c, metered.Command{ID: name, Input: 1}, late)
		require.NotEmpty(t, metered.Code(err), name)
		require.Equal(t, metered.Code(lateErr), metered.Code(err), name)
		require.IsType(t, lateErr, err, name)
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Holds.Release(ctx, tx, holds.Release{IDs: []string{"h"}})
		return err
	}))
	_, err := metered.Do(ctx, c, metered.Command{ID: "refused", Holds: one("ben")[:1]}, placedIDs)
	require.ErrorIs(t, err, holds.ErrConflict, "its id is ann's: only placing tells")
}

func placedIDs(_ context.Context, tx *metered.Tx) (int, error) { return len(tx.Placed), nil }

// The first look asks nothing for a repetition: whatever stands in the way by now, it gets the first result. An error of the
// look has the code that it would have later.
func TestCommand_DeclaredHoldsDoNotKeepAReplayFromItsAnswer(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	cmd := metered.Command{ID: "op", Holds: []holds.Request{{TTL: time.Minute, Lines: []holds.Line{
		{Scope: "s", Amount: 1, Limits: []budget.Limit{budget.PerWindow(9, time.Hour)}}}}}}
	out, err := metered.Do[any](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	clock.Advance(-time.Hour)
	again, err := metered.Do[any](t.Context(), c, cmd, nil)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, out.Holds, again.Holds)
	cmd.ID = "another"
	_, err = metered.Do(t.Context(), c, cmd, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrClock)
}

// Declared holds are placed with all the rest or not at all, and a limit is never passed.
func TestCommand_DeclaredHoldsNeverPassTheirLimit(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{MaxAttempts: 100}, pgtest.Options{MaxConns: 12})
			const callers, each, stock = 10, 6, 20
			var placed atomic.Int64
			atOnce(callers, func(i int) {
				for j := range each {
					cmd := metered.Command{
						ID: fmt.Sprint(i, "/", j), Isolation: level, Charges: []budget.Charge{charge(fmt.Sprint("fee", i), 1, 100)},
						Holds: []holds.Request{{TTL: time.Hour, Lines: []holds.Line{room("stock", 1, stock), room(fmt.Sprint("own", i), 1, 100)}}},
					}
					switch _, err := metered.Do(t.Context(), c, cmd, placedIDs); metered.Code(err) {
					case "budget_exceeded":
					case "":
						require.NoError(t, err)
						placed.Add(1)
					default:
						t.Errorf("%v", err)
					}
				}
			})
			require.EqualValues(t, stock, placed.Load())
			require.EqualValues(t, stock, pgtest.Value[int64](t, pool, "select held from metered.ledger where scope = 'stock' order by seq desc limit 1"))
			require.EqualValues(t, stock, pgtest.Value[int64](t, pool, "select sum(amount) from metered.ledger where scope like 'fee%'"))
			require.Equal(t, stock, count(t, pool, "metered.holds"))
		})
	}
}

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
		_, err := metered.Do[any](ctx, c, metered.Command{ID: id, Isolation: level, Holds: []holds.Request{
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
			holds.Request{TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: seatsOf}}}))
		return err
	},
	"Ledger.Charge": func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, _ string, level pgx.TxIsoLevel) error {
		return pgtest.Retried(ctx, pool, level, func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "hall", Amount: 1, Limits: seatsOf})
			return err
		})
	},
	"Book.Place": func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, _ string, level pgx.TxIsoLevel) error {
		return pgtest.Retried(ctx, pool, level, func(tx pgx.Tx) error {
			_, err := c.Holds.Place(ctx, tx, holds.Request{TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 1, Limits: seatsOf}}})
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

// A capacity that is lowered while a call waits for the scope counts: nobody is let in by the one before.
func TestCapacity_LoweredWhileACallWaitsForTheLockIsTheOneThatCounts(t *testing.T) {
	t.Parallel()
	for name, take := range ways {
		for _, level := range isolationLevels {
			t.Run(name+", "+string(level), func(t *testing.T) {
				t.Parallel()
				pool, c := setUp(t, metered.Config{EarlyLook: true})
				ctx := t.Context()
				hall(t, pool, 4)
				for i := range 3 {
					require.NoError(t, take(ctx, pool, c, fmt.Sprint("op", i), level))
				}
				unlock := lockScope(t, pool, c, "hall")
				answered := make(chan error, 1)
				go func() { answered <- take(ctx, pool, c, "late", level) }()
				pgtest.WaitAdvisory(t, pool, 1)
				_, err := pool.Exec(ctx, `update halls set seats = 3`)
				require.NoError(t, err)
				unlock()
				var exceeded *budget.ExceededError
				require.ErrorAs(t, <-answered, &exceeded)
				require.EqualValues(t, 3, exceeded.Refusals[0].Limit.Max)
				require.Equal(t, "seats", exceeded.Refusals[0].Limit.Name)

				_, err = pool.Exec(ctx, `update halls set seats = 4`)
				require.NoError(t, err)
				require.NoError(t, take(ctx, pool, c, "raised", level), "the early look leaves the limit out")
				require.ErrorIs(t, take(ctx, pool, c, "full", level), budget.ErrExceeded)
			})
		}
	}
}

// Under load, with a capacity that moves, never more is taken than it allows at the time.
func TestCapacity_ThatMovesIsNeverPassed(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{MaxAttempts: 100}, pgtest.Options{MaxConns: 12})
			ctx := t.Context()
			hall(t, pool, 0)
			const rounds, callers = 8, 6
			var taken atomic.Int64
			for round := range int64(rounds) {
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
					switch err := ways["Command.Charges"](ctx, pool, c, fmt.Sprint(round, "/", i), level); metered.Code(err) {
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
	require.ErrorIs(t, err, metered.ErrBusy)
	require.NotErrorIs(t, err, budget.ErrLimitQuery)
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
		require.ErrorIs(t, err, budget.ErrLimitQuery, sql)
		require.ErrorContains(t, err, text)
		require.False(t, metered.Retryable(err))
	}
	two := []budget.Charge{{Scope: "fine", Amount: 1, Limits: seatsOf}, {Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom("select seats from nowhere")}}}
	_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: two}, nil)
	require.ErrorIs(t, err, budget.ErrLimitQuery)
	require.ErrorContains(t, err, "or of another limit")
	// Above READ COMMITTED a query that locks nothing answers from before the locks.
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op", Isolation: pgx.RepeatableRead, Charges: []budget.Charge{
		{Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom("select seats from halls")}}}}, nil)
	require.ErrorIs(t, err, budget.ErrLimitQuery)
	require.ErrorContains(t, err, "FOR SHARE")
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{
		{Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom(" ")}}}}, nil)
	require.ErrorIs(t, err, metered.ErrArgument)
	require.Zero(t, count(t, pool, "metered.ledger"))

	_, err = c.Budget.Check(ctx, pool, budget.Charge{Scope: "hall", Amount: 1, Limits: []budget.Limit{
		budget.Lifetime(0).MaxFrom("select v from (values (7), (0)) t(v)")}})
	require.ErrorIs(t, err, budget.ErrLimitQuery)
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

// createScopes and retireScopes do so in a transaction of their own.
func createScopes(t *testing.T, c *metered.Client, pool *pgxpool.Pool, scopes ...string) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Create(t.Context(), tx, scopes...)
		return err
	}))
}

func retireScopes(ctx context.Context, c *metered.Client, pool *pgxpool.Pool, scopes ...string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Retire(ctx, tx, scopes...)
		return err
	})
}

// A command that uses a scope that must exist and does not is refused, and leaves nothing. Where it declares that use
// it is refused before its function runs.
func TestDo_AScopeThatMustExistAndDoesNotRefusesTheCommand(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			var refusals []error
			pool, c := setUp(t, metered.Config{EarlyLook: true, OnRefusal: func(_ context.Context, d metered.Refusal) {
				refusals = append(refusals, d.Err)
				require.False(t, d.Sticky)
			}})
			createScopes(t, c, pool, "seat/1", "seat/2")
			require.NoError(t, retireScopes(t.Context(), c, pool, "seat/2"))
			one := func(scope string) budget.Charge { return budget.Charge{Scope: scope, Amount: 1, MustExist: true} }
			line := func(scope string) []holds.Line { return []holds.Line{{Scope: scope, Amount: 1, MustExist: true}} }
			refused := 0
			for scope, want := range map[string]error{"seat/3": budget.ErrScopeUnknown, "seat/2": budget.ErrScopeRetired} {
				for what, cmd := range map[string]metered.Command{
					"charge": {ID: "op", Charges: []budget.Charge{one("seat/1"), one(scope)}},
					"sticky": {ID: "op", Sticky: []budget.Charge{one(scope)}},
				} {
					cmd.Isolation = level
					_, err := metered.Do(t.Context(), c, cmd, mustNotRun(t))
					require.ErrorIs(t, err, want, what)
					require.NotErrorIs(t, err, metered.ErrTooManyAttempts)
					require.NotErrorIs(t, err, metered.ErrSticky)
					require.False(t, metered.Retryable(err))
					refused++
				}
				for what, fn := range map[string]func(ctx context.Context, tx *metered.Tx) error{
					"charge": func(_ context.Context, tx *metered.Tx) error { return tx.Charge(one("seat/1"), one(scope)) },
					"credit": func(_ context.Context, tx *metered.Tx) error {
						return tx.Credit(budget.Credit{Scope: scope, Amount: 1, MustExist: true})
					},
					"place": func(ctx context.Context, tx *metered.Tx) error {
						_, err := tx.Place(ctx, holds.Request{Lines: line(scope), TTL: time.Minute}, nil)
						return err
					},
					"claim": func(ctx context.Context, tx *metered.Tx) error {
						_, err := tx.Claim(ctx, holds.Claim{Key: holds.Key{Type: "k", Value: "v"}, Holder: "ann", Lines: line(scope), TTL: time.Minute}, nil)
						return err
					},
				} {
					_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1, Isolation: level}, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
						if _, err := tx.Exec(ctx, `insert into uploads values ('x')`); err != nil {
							return uploaded{}, err
						}
						return uploaded{}, fn(ctx, tx)
					})
					require.ErrorIs(t, err, want, what)
					refused++
				}
			}
			require.Len(t, refusals, refused, "each counts as a refusal")
			for _, table := range []string{"uploads", "metered.ledger", "metered.operations", "metered.holds"} {
				require.Zero(t, count(t, pool, table), table)
			}
			_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1, Isolation: level, Charges: []budget.Charge{one("seat/1")}}, upload("x"))
			require.NoError(t, err)
		})
	}
}

// A scope that is retired while the function runs is refused in the last flush.
func TestDo_AScopeThatIsRetiredMeanwhileRefusesTheCommand(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			createScopes(t, c, pool, "a")
			runs := 0
			_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1, Isolation: level, EarlyLook: true, Charges: []budget.Charge{{Scope: "a", Amount: 1, MustExist: true}}},
				func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
					if runs++; runs == 1 {
						if err := retireScopes(ctx, c, pool, "a"); err != nil {
							return uploaded{}, err
						}
					}
					return upload("x")(ctx, tx)
				})
			require.ErrorIs(t, err, budget.ErrScopeRetired)
			require.Equal(t, 1, runs)
			require.Zero(t, count(t, pool, "uploads"))
			require.Zero(t, count(t, pool, "metered.ledger"))
		})
	}
}

// An early look whose snapshot is older than the scope is no refusal.
func TestDoTx_AScopeThatWasCreatedSinceTheSnapshotIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels[1:] {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			require.Zero(t, pgtest.Value[int](t, tx, `select count(*) from metered.ledger`))
			createScopes(t, c, pool, "a")
			_, err = metered.DoTx(t.Context(), c, tx, metered.Command{ID: "op", Input: 1, EarlyLook: true, Charges: []budget.Charge{{Scope: "a", Amount: 1, MustExist: true}}}, mustNotRun(t))
			require.NotErrorIs(t, err, budget.ErrScopeUnknown)
			require.True(t, metered.Retryable(err), "%v", err)
		})
	}
}

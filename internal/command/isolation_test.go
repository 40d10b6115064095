package command_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/tokens"
)

// A refusal rests on the rows that are committed by now, with any snapshot: a credit, a refund or a return that
// commits while the command runs lets it in, since it is run again.
func TestDo_NoRefusalOfAnOldSnapshotIsFinal(t *testing.T) {
	t.Parallel()
	pool, client := setUp(t, metered.Config{})
	key := func(of string) holds.Key { return holds.Key{Type: "mail", Value: of} }
	line := func(scope string) []holds.Line {
		return []holds.Line{{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}
	}
	in := func(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) error) error {
		return pgx.BeginFunc(ctx, pool, fn)
	}
	for name, c := range map[string]struct {
		before, meanwhile func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, of string) error
		do                func(ctx context.Context, tx *metered.Tx, of string) error
	}{
		"credit that is topped up": {
			meanwhile: func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, of string) error {
				return in(ctx, pool, func(tx pgx.Tx) error {
					_, err := c.Budget.Credit(ctx, tx, budget.Credit{Scope: of, Amount: 5})
					return err
				})
			},
			do: func(_ context.Context, tx *metered.Tx, of string) error {
				return tx.Charge(budget.Charge{Scope: of, Amount: 5, Limits: []budget.Limit{budget.Prepaid(0)}})
			},
		},
		"a claim that is released": {
			before: func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, of string) error {
				return in(ctx, pool, func(tx pgx.Tx) error {
					_, err := c.Holds.Claim(ctx, tx, holds.Claim{Key: key(of), Holder: "ann", TTL: time.Minute})
					return err
				})
			},
			meanwhile: func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, of string) error {
				return in(ctx, pool, func(tx pgx.Tx) error {
					claimed, err := c.Holds.Claimed(ctx, tx, "", key(of))
					if err != nil {
						return err
					}
					_, err = c.Holds.Release(ctx, tx, holds.Release{IDs: []string{claimed[key(of)].ID}})
					return err
				})
			},
			do: func(ctx context.Context, tx *metered.Tx, of string) error {
				_, err := tx.Claim(ctx, holds.Claim{Key: key(of), Holder: "ben", TTL: time.Minute}, nil)
				return err
			},
		},
		"a hold that is placed": {
			meanwhile: func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, of string) error {
				return in(ctx, pool, func(tx pgx.Tx) error {
					_, err := c.Holds.Place(ctx, tx, holds.Placement{ID: of, Holder: "ann", TTL: time.Minute, Lines: line(of)})
					return err
				})
			},
			do: func(_ context.Context, tx *metered.Tx, of string) error {
				return tx.Capture(holds.Capture{IDs: []string{of}, Holder: "ann", All: true})
			},
		},
		"a capacity that is released": {
			before: func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, of string) error {
				return in(ctx, pool, func(tx pgx.Tx) error {
					_, err := c.Holds.Place(ctx, tx, holds.Placement{ID: of, TTL: time.Minute, Lines: line(of)})
					return err
				})
			},
			meanwhile: func(ctx context.Context, pool *pgxpool.Pool, c *metered.Client, of string) error {
				return in(ctx, pool, func(tx pgx.Tx) error {
					_, err := c.Holds.Release(ctx, tx, holds.Release{IDs: []string{of}})
					return err
				})
			},
			do: func(ctx context.Context, tx *metered.Tx, of string) error {
				_, err := tx.Place(ctx, holds.Placement{ID: of + ", mine", TTL: time.Minute, Lines: line(of)}, nil)
				return err
			},
		},
	} {
		for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(name+", "+string(iso), func(t *testing.T) {
				of := t.Name()
				if c.before != nil {
					require.NoError(t, c.before(t.Context(), pool, client, of))
				}
				// The snapshot is that of the first statement, which has been made when the function runs.
				attempts := 0
				_, err := metered.Do(t.Context(), client, metered.Command{ID: of, Input: 1, Isolation: iso},
					func(ctx context.Context, tx *metered.Tx) (any, error) {
						if attempts++; attempts == 1 {
							if err := c.meanwhile(ctx, pool, client, of); err != nil {
								return nil, err
							}
						}
						return nil, c.do(ctx, tx, of)
					})
				require.NoError(t, err)
			})
		}
	}
	pgtest.RequireVerified(t, pool, client.Budget)
}

// Nor is the early look's, whose snapshot is as old as the wait for the operation's id.
func TestDo_TheEarlyLookOfAnOldSnapshotIsNotFinal(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			ctx, name := t.Context(), string(iso)
			first, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = first.Rollback(context.WithoutCancel(ctx)) }()
			_, err = metered.DoTx[any](ctx, c, first, metered.Command{ID: name}, nil)
			require.NoError(t, err)
			prepaid := budget.Charge{Scope: name, Amount: 5, Limits: []budget.Limit{budget.Prepaid(0)}}
			second := pgtest.Going(func() error {
				_, err := metered.Do[any](ctx, c, metered.Command{ID: name, Isolation: iso, EarlyLook: true, Charges: []budget.Charge{prepaid}}, nil)
				return err
			})
			pgtest.WaitQueued(t, pool, 1)
			_, err = pgtest.InTx(ctx, pool, func(tx pgx.Tx) (budget.Posted, error) {
				return c.Budget.Credit(ctx, tx, budget.Credit{Scope: name, Amount: 5})
			})
			require.NoError(t, err)
			require.NoError(t, first.Rollback(ctx))
			require.NoError(t, <-second)
		})
	}
}

// In a transaction of the caller's the refusal is an error of the moment, for its own retries.
func TestOldSnapshot_ARefusalIsToBeTriedAgain(t *testing.T) {
	t.Parallel()
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, c := setUp(t, metered.Config{})
			secret, err := tokens.Derive([]byte("n3K9vQ2xLw8TzR5mYb7HcF4jDs6GpA1e"), "token")
			require.NoError(t, err)
			taken, err := pool.Begin(ctx) // to learn the token's text
			require.NoError(t, err)
			presented, err := c.Tokens.Mint(ctx, taken, tokens.Mint{Purpose: "p", Subject: "s", Secret: secret})
			require.NoError(t, err)
			require.NoError(t, taken.Rollback(ctx))
			for name, call := range map[string]struct {
				do, meanwhile func(tx pgx.Tx) error
			}{
				"charge": {
					do: func(tx pgx.Tx) error {
						_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 5, Limits: []budget.Limit{budget.Prepaid(0)}})
						return err
					},
					meanwhile: func(tx pgx.Tx) error {
						_, err := c.Budget.Credit(ctx, tx, budget.Credit{Scope: "w", Amount: 5})
						return err
					},
				},
				"consume": {
					do: func(tx pgx.Tx) error {
						_, err := c.Tokens.Consume(ctx, tx, "p", "s", presented.Token.Reveal())
						return err
					},
					meanwhile: func(tx pgx.Tx) error {
						_, err := c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s", Secret: secret})
						return err
					},
				},
				"expire": {
					do: func(tx pgx.Tx) error {
						_, _, err := c.Holds.Expire(ctx, tx, holds.Expire{ID: "e", Deadline: time.Now()})
						return err
					},
					meanwhile: func(tx pgx.Tx) error {
						_, err := c.Holds.Place(ctx, tx, holds.Placement{ID: "e", TTL: time.Minute, Lines: []holds.Line{{Scope: "e", Amount: 1}}})
						return err
					},
				},
			} {
				tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: iso})
				require.NoError(t, err)
				_, err = tx.Exec(ctx, "select count(*) from metered.ledger") // the snapshot
				require.NoError(t, err)
				require.NoError(t, pgx.BeginFunc(ctx, pool, call.meanwhile))
				err = call.do(tx)
				require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err), "%s: %v", name, err)
				require.True(t, metered.Retryable(err))
				require.NoError(t, tx.Rollback(ctx))
				require.NoError(t, pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: iso}, call.do), name)
			}
		})
	}
}

// A refusal that is still true is final, at every level, and leaves the transaction usable.
func TestOldSnapshot_ATrueRefusalIsFinal(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, c := setUp(t, metered.Config{})
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: iso})
		require.NoError(t, err)
		_, err = c.Budget.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 5, Limits: []budget.Limit{budget.Prepaid(0)}})
		require.ErrorIs(t, err, budget.ErrExceeded)
		_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{"none"}, All: true})
		require.ErrorIs(t, err, holds.ErrUnknown)
		require.NoError(t, tx.Commit(ctx))
	}
	require.Zero(t, count(t, pool, "metered.ledger"))
	require.Zero(t, count(t, pool, "metered.holds"))
}

// pieces are calls that others may have made impossible since the snapshot of their transaction.
func pieces(t *testing.T, c *metered.Client, presented string) map[string]struct {
	call    func(ctx context.Context, tx pgx.Tx) error
	refused error
} {
	t.Helper()
	token, err := c.Tokens.Parse(presented)
	require.NoError(t, err)
	return map[string]struct {
		call    func(ctx context.Context, tx pgx.Tx) error
		refused error
	}{
		"charge": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, charge("one", 1, 1))
			return err
		}, budget.ErrExceeded},
		"place": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := c.Holds.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{room("room", 1, 1)}})
			return err
		}, budget.ErrExceeded},
		"claim": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := c.Holds.Claim(ctx, tx, holds.Claim{Key: holds.Key{Type: "seat", Value: "1"}, Holder: metered.NewID(), TTL: time.Minute})
			return err
		}, holds.ErrTaken},
		"consume": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := c.Tokens.Consume(ctx, tx, "upload", "ann", token.Reveal())
			return err
		}, tokens.ErrInvalid},
		"command": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := metered.DoTx[any](ctx, c, tx, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{charge("command", 1, 1)}}, nil)
			return err
		}, budget.ErrExceeded},
	}
}

// All callers take their snapshots before anybody commits, and there is room for half of them. All but one lose, and run again one
// after the other: within the default number of attempts each of them gets its hold or its refusal.
func TestCollisions_EachLoserGetsItsTurn(t *testing.T) {
	t.Parallel()
	const callers, room = 12, 6
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}}, pgtest.Options{MaxConns: callers})
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for how, place := range map[string]func(r holds.Placement, began func()) error{
			"Do": func(r holds.Placement, began func()) error {
				_, err := metered.Do(t.Context(), c, metered.Command{ID: r.ID, Isolation: level, Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
					began()
					_, err := tx.Place(ctx, r, nil)
					return nil, err
				})
				return err
			},
			"RunTx": func(r holds.Placement, began func()) error {
				return c.RunTx(t.Context(), pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "select")
					began()
					if err == nil {
						_, err = c.Holds.Place(ctx, tx, r)
					}
					return err
				})
			},
		} {
			var runs, placed, refused atomic.Int64
			var all sync.WaitGroup
			all.Add(callers)
			how += string(level)
			atOnce(callers, func(i int) {
				first := sync.OnceFunc(func() { all.Done(); all.Wait() })
				r := holds.Placement{ID: fmt.Sprint(how, i), TTL: time.Hour, Lines: []holds.Line{{Scope: how, Amount: 1, Limits: []budget.Limit{budget.Lifetime(room)}}}}
				switch err := place(r, func() { runs.Add(1); first() }); {
				case err == nil:
					placed.Add(1)
				case errors.Is(err, budget.ErrExceeded):
					refused.Add(1)
				default:
					t.Errorf("%s: %v", how, err)
				}
			})
			require.EqualValues(t, room, placed.Load(), how)
			require.EqualValues(t, callers-room, refused.Load(), how)
			require.LessOrEqual(t, runs.Load(), int64(3*callers), "%s: they run in turn", how)
			require.Equal(t, room, count(t, pool, "metered.holds where id like '"+how+"%'"))
		}
	}
}

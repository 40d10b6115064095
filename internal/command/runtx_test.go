package command_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Above READ COMMITTED the loser of a conflict gets a typed error. RunTx runs it again and returns the final answer.
func TestRunTx_ALoserGetsTheRefusalThatItIs(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			ctx := t.Context()
			for name, piece := range pieces(t, c, mint(t, pool, c)) {
				var errs []error
				err := c.RunTx(ctx, pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "select from metered.ledger limit 1") // the snapshot
					require.NoError(t, err)
					if len(errs) == 0 {
						require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return piece.call(ctx, tx) }), "the winner")
					}
					errs = append(errs, piece.call(ctx, tx))
					return errs[len(errs)-1]
				})
				require.ErrorIs(t, err, piece.refused, name)
				require.False(t, metered.Retryable(err))
				if level != pgx.ReadCommitted {
					require.Len(t, errs, 2, name)
					require.ErrorIs(t, errs[0], budget.ErrSerialization, name)
					require.Equal(t, "serialization", metered.Code(errs[0]))
					require.True(t, metered.Retryable(errs[0]))
				}
			}
		})
	}
}

// Transactions read and write each other's rows, at SERIALIZABLE: each takes effect or is refused.
func TestRunTx_ConcurrentTransactionsEndExactly(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := setUp(t, metered.Config{MaxAttempts: 100}, pgtest.Options{MaxConns: 8})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			var made, refused atomic.Int64
			atOnce(8, func(i int) {
				for range 6 {
					err := c.RunTx(t.Context(), pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
						if _, err := tx.Exec(ctx, "insert into uploads select $1 || count(*) from uploads", fmt.Sprint(level, i)); err != nil {
							return err
						}
						_, err := c.Budget.Charge(ctx, tx, charge(string(level), 1, 30))
						return err
					})
					switch metered.Code(err) {
					case "budget_exceeded":
						refused.Add(1)
					case "":
						if err != nil {
							t.Errorf("%v", err)
							return
						}
						made.Add(1)
					default:
						t.Errorf("%v", err)
					}
				}
			})
			require.EqualValues(t, 30, made.Load())
			require.EqualValues(t, 18, refused.Load())
			require.EqualValues(t, 30, used(t, pool, c, string(level)))
			require.Equal(t, 30, count(t, pool, "uploads where name like '"+string(level)+"%'"))
		})
	}
}

func TestRunTx_EndsItsTransactionInEachCase(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{MaxAttempts: 3})
	ctx := t.Context()
	write := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "insert into uploads values ('a')")
		return err
	}
	run := func(fn func(ctx context.Context, tx pgx.Tx) error) error {
		return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			require.NoError(t, write(ctx, tx))
			return fn(ctx, tx)
		})
	}
	require.ErrorIs(t, run(func(context.Context, pgx.Tx) error { return errOwn }), errOwn)
	require.Panics(t, func() { _ = run(func(context.Context, pgx.Tx) error { panic("oh") }) })
	require.ErrorIs(t, run(func(ctx context.Context, tx pgx.Tx) error {
		_, _ = tx.Exec(ctx, "select 1/0")
		return nil
	}), guardtx.ErrFailed)
	attempts := 0
	err := run(func(ctx context.Context, tx pgx.Tx) error {
		attempts++
		_, err := tx.Exec(ctx, "do $$ begin raise 'no' using errcode = '40001'; end $$")
		return err
	})
	require.ErrorIs(t, err, budget.ErrSerialization)
	require.Equal(t, 3, attempts)
	require.ErrorIs(t, run(inACommand(c)), command.ErrNested)
	require.ErrorIs(t, c.RunTx(ctx, pgx.TxOptions{}, nil), budget.ErrArgument)
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, c.RunTx(cancelled, pgx.TxOptions{}, write), context.Canceled)
	late, cancel := context.WithCancel(ctx)
	defer cancel()
	err = c.RunTx(late, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		require.NoError(t, write(ctx, tx))
		cancel()
		return nil
	})
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, budget.ErrCommitUnknown, "COMMIT was not sent")
	require.Zero(t, count(t, pool, "uploads"))
	pgtest.WaitFor(t, "its connections", func() bool { return pool.Stat().AcquiredConns() == 0 })
	require.NoError(t, c.RunTx(ctx, pgx.TxOptions{}, write))
	require.Equal(t, 1, count(t, pool, "uploads"))
}

// inACommand runs RunTx inside a command's function.
func inACommand(c *metered.Client) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op"}, func(ctx context.Context, _ *metered.Tx) (any, error) {
			return nil, c.RunTx(ctx, pgx.TxOptions{}, func(context.Context, pgx.Tx) error { return nil })
		})
		return err
	}
}

// Nothing names the transaction, so nobody can look up its outcome: no repetition is safe.
func TestRunTx_ALostAnswerToCommitIsUnknown(t *testing.T) {
	t.Parallel()
	owner, w, c, _ := onWire(t, metered.Config{}, nil)
	w.Once(func(f *pgtest.Flush) bool { return f.Has("commit") }, func(f *pgtest.Flush) { f.LoseAnswer() })
	err := c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "insert into uploads values ('lost')")
		return err
	})
	require.ErrorIs(t, err, budget.ErrCommitUnknown)
	require.False(t, metered.Retryable(err))
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Equal(t, 1, count(t, owner, "uploads where name = 'lost'"))
}

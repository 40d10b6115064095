package metered_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

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
			_, err := c.Holds.Place(ctx, tx, holds.Request{TTL: time.Minute, Lines: []holds.Line{room("room", 1, 1)}})
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

// Who loses to another transaction above READ COMMITTED is told so by a typed error, and by RunTx what came of it.
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
					require.ErrorIs(t, errs[0], metered.ErrSerialization, name)
					require.Equal(t, "serialization", metered.Code(errs[0]))
					require.True(t, metered.Retryable(errs[0]))
				}
			}
		})
	}
}

// Transactions that read and write what the others do, at SERIALIZABLE: each gets its turn or its refusal.
func TestRunTx_ConcurrentTransactionsEndExactly(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUpWith(t, metered.Config{MaxAttempts: 100}, pgtest.Options{MaxConns: 8})
			var made, refused atomic.Int64
			inParallel(8, func(i int) {
				for range 6 {
					err := c.RunTx(t.Context(), pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
						if _, err := tx.Exec(ctx, "insert into uploads select $1 || count(*) from uploads", fmt.Sprint(i)); err != nil {
							return err
						}
						_, err := c.Budget.Charge(ctx, tx, charge("stock", 1, 30))
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
			require.EqualValues(t, 30, used(t, pool, c, "stock"))
			require.Equal(t, 30, count(t, pool, "uploads"))
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
	}), metered.ErrTxFailed)
	attempts := 0
	err := run(func(ctx context.Context, tx pgx.Tx) error {
		attempts++
		_, err := tx.Exec(ctx, "do $$ begin raise 'no' using errcode = '40001'; end $$")
		return err
	})
	require.ErrorIs(t, err, metered.ErrSerialization)
	require.Equal(t, 3, attempts)
	require.ErrorIs(t, run(inACommand(c)), metered.ErrNested)
	require.ErrorIs(t, c.RunTx(ctx, pgx.TxOptions{}, nil), metered.ErrArgument)
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, c.RunTx(cancelled, pgx.TxOptions{}, write), context.Canceled)
	require.Zero(t, count(t, pool, "uploads"))
	require.Zero(t, pool.Stat().AcquiredConns())
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

// Nothing names the transaction, so nobody can look up what became of it: no repetition may be taken for safe.
func TestRunTx_ALostAnswerToCommitIsUnknown(t *testing.T) {
	t.Parallel()
	owner, w, c, _ := onWire(t, metered.Config{}, nil)
	w.Once(func(f *pgtest.Flush) bool { return f.Has("commit") }, func(f *pgtest.Flush) { f.LoseAnswer() })
	err := c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "insert into uploads values ('lost')")
		return err
	})
	require.ErrorIs(t, err, metered.ErrCommitUnknown)
	require.False(t, metered.Retryable(err))
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Equal(t, 1, count(t, owner, "uploads where name = 'lost'"))
}

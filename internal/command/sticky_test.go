package command_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

var tries = []budget.Charge{charge("tries", 1, 100)}

func TestSticky_StaysWhenTheCommandFails(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	fill(t, pool, c, "full", 5)
	for i, test := range []struct {
		cmd metered.Command
		fn  metered.Func[any]
		err error
	}{
		{metered.Command{Input: 1}, func(context.Context, *metered.Tx) (any, error) { return nil, errOwn }, errOwn},
		{metered.Command{Input: 1, Charges: []budget.Charge{charge("full", 1, 5)}}, nil, budget.ErrExceeded},
		{metered.Command{Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) { return nil, tx.Charge(charge("full", 1, 5)) }, budget.ErrExceeded},
		{metered.Command{Input: 1, Token: redeem(unknownToken(t, c))}, nil, tokens.ErrInvalid},
		{metered.Command{Input: 1}, nil, nil},
	} {
		test.cmd.ID, test.cmd.Sticky = fmt.Sprint(i), tries
		out, err := metered.Do(ctx, c, test.cmd, test.fn)
		require.ErrorIs(t, err, test.err)
		require.NotErrorIs(t, err, metered.ErrTooManyAttempts, "a charge, if any, was refused")
		require.Equal(t, int64(i+1), used(t, pool, c, "tries"))
		require.Len(t, out.Sticky.Entries, 1)
		require.Equal(t, tries[0].Limits[0].Max-int64(i+1), out.Sticky.Entries[0].Standings[0].Available)
		if err != nil {
			require.Equal(t, metered.Outcome[any]{Sticky: out.Sticky}, out)
		}
	}
	require.Panics(t, func() {
		_, _ = metered.Do(ctx, c, metered.Command{ID: "panics", Input: 1, Sticky: tries}, func(context.Context, *metered.Tx) (any, error) { panic("oh") })
	})
	require.Equal(t, int64(6), used(t, pool, c, "tries"))
	require.Zero(t, pool.Stat().AcquiredConns())
	out, err := metered.Do[any](ctx, c, metered.Command{ID: "4", Input: 1, Sticky: tries}, nil)
	require.NoError(t, err)
	require.True(t, out.Replayed)
	require.Empty(t, out.Sticky)
	require.Equal(t, int64(6), used(t, pool, c, "tries"), "a replay is charged")
	require.Empty(t, out.Receipt.Entries, "not part of the receipt")
}

// The units that are left after this very attempt, also for a function that fails.
func TestSticky_FunctionSeesItsReceipt(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	limit := tries[0].Limits[0]
	for i := range int64(3) {
		var receipt budget.Receipt
		_, err := metered.Do(t.Context(), c, metered.Command{ID: fmt.Sprint(i), Sticky: tries},
			func(_ context.Context, tx *metered.Tx) (any, error) {
				receipt = tx.Sticky
				return nil, errOwn
			})
		require.ErrorIs(t, err, errOwn)
		require.Len(t, receipt.Entries, 1)
		require.Equal(t, i+1, receipt.Entries[0].Seq)
		require.Equal(t, []budget.Standing{{Limit: limit, Used: i + 1, Available: limit.Max - i - 1}}, receipt.Entries[0].Standings)
	}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "without"}, func(_ context.Context, tx *metered.Tx) (any, error) {
		require.Empty(t, tx.Sticky.Entries)
		return nil, nil
	})
	require.NoError(t, err)
}

func TestSticky_RefusalRefusesTheCommand(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	presented := mint(t, pool, c)
	command := func(id string) metered.Command {
		return metered.Command{ID: id, Token: redeem(presented), Sticky: []budget.Charge{charge("tries", 1, 2)}}
	}
	for _, id := range []string{"a", "b"} {
		_, err := metered.Do(ctx, c, command(id), func(context.Context, *metered.Tx) (uploaded, error) { return uploaded{}, errOwn })
		require.ErrorIs(t, err, errOwn)
	}
	out, err := metered.Do(ctx, c, command("c"), mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.ErrorIs(t, err, metered.ErrTooManyAttempts)
	require.Equal(t, "budget_exceeded", metered.Code(err))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "tries", exceeded.Refusals[0].Scope)
	require.Empty(t, out, "nothing was charged")
	require.NotErrorIs(t, err, metered.ErrSticky)
	require.Zero(t, pgtest.Value[int](t, pool, "select used from metered.tokens"))
	require.Equal(t, int64(2), used(t, pool, c, "tries"))
}

func TestSticky_IsSharedByTheRetriesOfACall(t *testing.T) {
	t.Parallel()
	owner, w, c, cmd := onWire(t, metered.Config{}, nil)
	cmd.Sticky = tries
	w.Once((*pgtest.Flush).Last, (*pgtest.Flush).Lose) // and a lost COMMIT is one more
	var runs atomic.Int64
	work := wholeFunc("op", func(step int) error {
		if step == 0 && runs.Add(1) < 4 {
			return &pgconn.PgError{Code: "40001"}
		}
		return nil
	})
	var seen []budget.Receipt
	out, err := metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		seen = append(seen, tx.Sticky)
		return work(ctx, tx)
	})
	require.NoError(t, err)
	require.False(t, out.Replayed)
	require.Equal(t, int64(5), runs.Load())
	require.Equal(t, int64(1), used(t, owner, c, "tries"))
	require.Equal(t, seen[0], out.Sticky)
	require.Len(t, seen, 5)
	for _, receipt := range seen {
		require.Equal(t, seen[0], receipt)
	}
	require.Equal(t, everything, footprintOf(t, owner, cmd))
}

func TestSticky_ConcurrentDuplicatesAreChargedIfTheyRan(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	const callers, fail = 8, 3
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}, MaxAttempts: 100}, pgtest.Options{MaxConns: callers + 1})
	for i, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			cmd := whole(t, pool, c, string(level))
			cmd.Sticky, cmd.Isolation = tries, level
			var runs, failed atomic.Int64
			atOnce(callers, func(int) {
				_, err := metered.Do(t.Context(), c, cmd, wholeFunc(cmd.ID, func(step int) error {
					if step == wholeSteps && runs.Add(1) <= fail {
						return errOwn
					}
					return nil
				}))
				if err != nil {
					require.ErrorIs(t, err, errOwn)
					failed.Add(1)
				}
			})
			require.Equal(t, int64(fail), failed.Load())
			require.Equal(t, everything, footprintOf(t, pool, cmd))
			require.EqualValues(t, (i+1)*(fail+1), used(t, pool, c, "tries"))
		})
	}
}

// Each holds one connection and wants a second. Clients of one pool share its places.
func TestSticky_DoesNotDeadlockOnASmallPool(t *testing.T) {
	t.Parallel()
	for _, size := range []int32{2, 3} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			pool, one := setUp(t, metered.Config{}, pgtest.Options{MaxConns: size})
			clients := []*metered.Client{one, newClient(t, pool, metered.Config{})}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			atOnce(50, func(i int) {
				c := clients[i%2]
				cmd := metered.Command{ID: fmt.Sprint(i % 40), Sticky: tries} // some are repeated
				if i%5 == 4 {
					cmd = metered.Command{ID: fmt.Sprint("without/", i)}
				}
				if _, err := metered.Do[any](ctx, c, cmd, nil); err != nil {
					t.Error(err)
				}
			})
			require.Equal(t, int64(32), used(t, pool, one, "tries"))
		})
	}
}

// asked tells when somebody waits for the context's end: here, for a place.
type asked struct {
	context.Context
	once   *sync.Once
	called chan struct{}
}

func (a asked) Done() <-chan struct{} {
	a.once.Do(func() { close(a.called) })
	return a.Context.Done()
}

// A retry, whose sticky charges are taken, does not take the last connection from a
// repetition that has the claim and wants a second one for its own.
func TestSticky_ARetryLeavesTheLastConnection(t *testing.T) {
	t.Parallel()
	_, w, c, cmd := onWire(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}}, func(config *pgxpool.Config) { config.MaxConns = 2 })
	cmd.Sticky = tries
	waiting := asked{t.Context(), new(sync.Once), make(chan struct{})}
	repeated := make(chan error, 1)
	retry := make(chan struct{})
	var claims, runs atomic.Int64
	w.Each(func(f *pgtest.Flush) {
		if !f.Has("begin_command") || !f.Has("begin isolation") {
			return
		}
		switch claims.Add(1) {
		case 2: // of the repetition: it hears of it when the retry has a connection, if it gets one
			f.Deliver = func() {
				f.Conn.Answer = f.Ask()
				select {
				case <-retry:
				case <-time.After(500 * time.Millisecond):
				}
			}
		case 3:
			close(retry)
		}
	})
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		if runs.Add(1) == 1 {
			go func() {
				_, err := metered.Do[any](waiting, c, cmd, nil)
				repeated <- err
			}()
			<-waiting.called
			return nil, &pgconn.PgError{Code: "40001"}
		}
		return nil, nil
	}
	_, err := metered.Do(t.Context(), c, cmd, fn)
	require.NoError(t, err)
	require.NoError(t, <-repeated)
}

func TestSticky_IsRefusedWhereItCannotBeTaken(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{}, pgtest.Options{MaxConns: 1})
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Sticky: tries}, mustNotRun(t))
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Command.Sticky", argument.Field)

	pool, c := setUp(t, metered.Config{})
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(t.Context(), c, tx, metered.Command{ID: "op", Sticky: tries}, mustNotRun(t))
		require.ErrorAs(t, err, &argument)
		return nil
	}))
	require.Zero(t, used(t, pool, c, "tries"))
}

// The command is not run when it is not known whether its sticky charge was taken.
func TestSticky_AFailureIsSaidAndTheCommandNotRun(t *testing.T) {
	t.Parallel()
	for what, fault := range map[string]func(*pgtest.Flush){"charge": (*pgtest.Flush).Lose, "commit": (*pgtest.Flush).LoseAnswer} {
		owner, w, c, cmd := onWire(t, metered.Config{}, func(config *pgxpool.Config) { config.MaxConns = 2 })
		cmd.Sticky = tries
		w.Once(func(f *pgtest.Flush) bool {
			return what == "charge" && f.Has(`.charge_plain($1`) || what == "commit" && len(f.SQL) == 1 && f.SQL[0] == "commit"
		}, fault)
		_, err := metered.Do(t.Context(), c, cmd, mustNotRun(t))
		require.ErrorIs(t, err, metered.ErrSticky, what)
		require.Equal(t, nothing, footprintOf(t, owner, cmd))
		require.Equal(t, map[string]int64{"charge": 0, "commit": 1}[what], used(t, owner, c, "tries"))
	}
}

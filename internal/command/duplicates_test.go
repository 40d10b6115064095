package command_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestDo_ConcurrentDuplicatesRunOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	const callers = 12
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}, MaxAttempts: 100}, pgtest.Options{MaxConns: callers})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			cmd := whole(t, pool, c, string(level))
			cmd.Isolation = level
			var outs [callers]metered.Outcome[uploaded]
			var errs [callers]error
			var first atomic.Int64
			atOnce(callers, func(i int) {
				outs[i], errs[i] = metered.Do(t.Context(), c, cmd, wholeFunc(cmd.ID, nil))
				if !outs[i].Replayed {
					first.Add(1)
				}
			})
			for i := range callers {
				require.NoError(t, errs[i])
				require.Equal(t, string(outs[0].Raw), string(outs[i].Raw))
				require.Equal(t, outs[0].Receipt.Entries[0].Seq, outs[i].Receipt.Entries[0].Seq)
			}
			require.Equal(t, int64(1), first.Load())
			require.Equal(t, everything, footprintOf(t, pool, cmd))
		})
	}
}

// A snapshot is older than the record of a command that has ended by the time the id is claimed: the function must
// not run, since it cannot see the rows that the command wrote.
func TestDo_AnOldSnapshotDoesNotHideARecord(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels[1:] {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			ctx := t.Context()
			cmd := metered.Command{ID: "op", Charges: []budget.Charge{charge("s", 1, 10)}}
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			_, err = tx.Exec(ctx, "select from uploads") // takes the snapshot
			require.NoError(t, err)

			_, err = metered.Do(ctx, c, cmd, upload("a"))
			require.NoError(t, err)
			_, err = metered.DoTx(ctx, c, tx, cmd, mustNotRun(t))
			require.ErrorContains(t, err, "40001")
		})
	}
}

func TestDo_DuplicatesOfAFailingCommandEachTryInTurn(t *testing.T) {
	t.Parallel()
	const callers = 8
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}, MaxAttempts: 100}, pgtest.Options{MaxConns: callers})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			cmd := whole(t, pool, c, string(level))
			cmd.Isolation = level
			var running, failed, ran atomic.Int64
			atOnce(callers, func(int) {
				_, err := metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
					if running.Add(1) != 1 {
						t.Error("two at once")
					}
					defer running.Add(-1)
					if ran.Add(1) <= 5 {
						_, err := tx.Exec(ctx, "insert into uploads values ($1)", cmd.ID)
						require.NoError(t, err)
						return uploaded{}, errOwn
					}
					return wholeFunc(cmd.ID, nil)(ctx, tx)
				})
				if err != nil {
					failed.Add(1)
				}
			})
			require.Equal(t, int64(5), failed.Load())
			require.Equal(t, everything, footprintOf(t, pool, cmd))
		})
	}
}

func TestDo_ADuplicateWaitsNoLongerThanTheLockTimeout(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			ctx := t.Context()
			cmd := metered.Command{ID: string(level), Isolation: level}
			_, err := metered.Do(ctx, c, cmd, func(inside context.Context, tx *metered.Tx) (uploaded, error) {
				_, err := metered.Do(ctx, c, cmd, mustNotRun(t))
				require.ErrorIs(t, err, budget.ErrBusy)
				require.Equal(t, "busy", metered.Code(err))
				other := cmd
				other.Tenant = "x"
				_, err = metered.Do(ctx, c, other, upload(cmd.ID+"b")) // another operation does not wait
				require.NoError(t, err)
				return upload(cmd.ID)(inside, tx)
			})
			require.NoError(t, err)
		})
	}
}

package jobs_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
)

func TestEnqueue_SecondOpenTransactionWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	f := open(t)
	for n, level := range isolationLevels {
		for m, commit := range []bool{true, false} {
			name := fmt.Sprintf("%s/commit=%t", level, commit)
			t.Run(name, func(t *testing.T) {
				first, second := f.begin(level), f.begin(level)
				made, err := f.Enqueue(f.ctx, first, process{"a"}, key(name))
				require.NoError(t, err)

				type answer struct {
					jobs.Result
					err error
				}
				answers := make(chan answer, 1)
				secondPID := pid(t, second)
				go func() {
					result, err := f.Enqueue(f.ctx, second, process{"a"}, key(name))
					answers <- answer{result, err}
				}()
				f.untilBlocked(secondPID)
				require.Empty(t, answers)
				if commit {
					require.NoError(t, first.Commit(f.ctx))
				} else {
					require.NoError(t, first.Rollback(f.ctx))
				}

				got := <-answers
				switch {
				case !commit:
					require.NoError(t, got.err)
					require.True(t, got.Created)
					require.NotEqual(t, made.JobID, got.JobID)
					require.NoError(t, second.Commit(f.ctx))
				case level == pgx.ReadCommitted:
					require.NoError(t, got.err)
					require.Equal(t, jobs.Result{JobID: made.JobID}, got.Result)
					require.NoError(t, second.Commit(f.ctx))
				default:
					require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(got.err), "%v", got.err)
					requireAborted(t, second)
				}
				f.requireCounts(2*n+m+1, 2*n+m+1)
			})
		}
	}
}

func TestEnqueue_ManyAtOnceWithOneKeyLeaveOneJob(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	callers := pgtest.Size(16, 64)
	f := open(t)
	for n, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			results, errs := make([]jobs.Result, callers), make([]error, callers)
			var wg sync.WaitGroup
			for i := range callers {
				wg.Go(func() {
					for {
						errs[i] = pgx.BeginTxFunc(f.ctx, f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) (err error) {
							results[i], err = f.Enqueue(f.ctx, tx, process{"a"}, key(string(level)))
							return err
						})
						if !retryable(errs[i]) {
							return
						}
					}
				})
			}
			wg.Wait()
			created := 0
			for i := range callers {
				require.NoError(t, errs[i])
				require.Equal(t, results[0].JobID, results[i].JobID)
				if results[i].Created {
					created++
				}
			}
			require.Equal(t, 1, created)
			f.requireCounts(n+1, n+1)
		})
	}
}

// Looking for a key before adding it would make every two of these each other's
// read-write conflict.
func TestEnqueue_DifferentKeysDoNotConflictAtSerializable(t *testing.T) {
	t.Parallel()
	f := open(t)
	var txs []pgx.Tx
	for i := range 8 {
		tx := f.begin(pgx.Serializable)
		_, err := f.Enqueue(f.ctx, tx, process{"a"}, key(fmt.Sprint("k", i)))
		require.NoError(t, err)
		txs = append(txs, tx)
	}
	slices.Reverse(txs) // the order in which Postgres would find a cycle
	for _, tx := range txs {
		require.NoError(t, tx.Commit(f.ctx))
	}
	f.requireCounts(8, 8)
}

func TestEnqueue_WaitIsBounded(t *testing.T) {
	t.Parallel()
	plugins := &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}}
	for name, c := range map[string]struct {
		timeout time.Duration
		session string
	}{
		"by the timeout":            {20 * time.Millisecond, "0"},
		"by the timeout, if first":  {20 * time.Millisecond, "1h"},
		"by the session's, if less": {time.Hour, "20ms"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := on(t, pgtest.Open(t), jobs.Config{LockTimeout: c.timeout}, plugins)
			first := f.begin(pgx.ReadCommitted)
			_, err := f.Enqueue(f.ctx, first, process{"secret"}, key("k-secret"))
			require.NoError(t, err)

			second := f.begin(pgx.ReadCommitted)
			_, err = second.Exec(f.ctx, "select set_config('lock_timeout', $1, true)", c.session)
			require.NoError(t, err)
			_, err = f.Enqueue(f.ctx, second, process{"secret"}, key("k-secret"))
			require.ErrorIs(t, err, budget.ErrBusy)
			require.Equal(t, "busy", metered.Code(err))
			require.Equal(t, sqlstate.LockNotAvailable, sqlstate.Of(err))
			require.NotContains(t, err.Error(), "secret")
			requireAborted(t, second)
			require.NoError(t, first.Commit(f.ctx))
			f.requireCounts(1, 1)
		})
	}
}

func TestEnqueueMany_WaitIsBoundedForAllKeysTogether(t *testing.T) {
	t.Parallel()
	// Ten holders let go one after the other, each when it has been waited for. Were the
	// bound for each key, no wait would reach it.
	f := on(t, pgtest.Open(t), jobs.Config{LockTimeout: 500 * time.Millisecond},
		&river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	const holders = 10
	var items []jobs.Item
	for i := range holders {
		items = append(items, jobs.Item{Args: process{"a"}, Options: key(fmt.Sprint("k", i))})
	}
	var open []pgx.Tx
	for _, item := range items {
		tx := f.begin(pgx.ReadCommitted)
		_, err := f.Enqueue(f.ctx, tx, item.Args, item.Options)
		require.NoError(t, err)
		open = append(open, tx)
	}
	tx := f.begin(pgx.ReadCommitted)
	result := pgtest.Going(func() error { _, err := f.EnqueueMany(f.ctx, tx, items); return err })
	for _, holder := range open {
		pgtest.WaitFor(t, "the call to wait, or to be over", func() bool { return len(result) > 0 || pgtest.Queued(t, f.pool) > 0 })
		if len(result) > 0 {
			break
		}
		time.Sleep(200 * time.Millisecond) // less than the bound
		require.NoError(t, holder.Rollback(f.ctx))
	}
	require.ErrorIs(t, <-result, budget.ErrBusy)
}

func TestEnqueueMany_OverlappingCallsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	f := open(t)
	const keys, callers = 40, 8
	var wg sync.WaitGroup
	errs := make([]error, callers)
	for c := range callers {
		wg.Go(func() {
			var items []jobs.Item
			for i := range keys {
				n := i
				if c%2 == 1 {
					n = keys - 1 - i
				}
				items = append(items, jobs.Item{Args: process{"a"}, Options: key(fmt.Sprintf("k%02d", n))})
			}
			errs[c] = pgx.BeginFunc(f.ctx, f.pool, func(tx pgx.Tx) error {
				_, err := f.EnqueueMany(f.ctx, tx, items)
				return err
			})
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	f.requireCounts(keys, keys)
}

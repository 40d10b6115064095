package jobs_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/jobs"
)

// keys enqueues n keys in one transaction.
func (f *fixture) keys(prefix string, n int) {
	f.t.Helper()
	items := make([]jobs.Item, n)
	for i := range items {
		items[i] = jobs.Item{Args: process{"a"}, Options: key(fmt.Sprint(prefix, i))}
	}
	require.NoError(f.t, pgx.BeginFunc(f.ctx, f.pool, func(tx pgx.Tx) error {
		_, err := f.EnqueueMany(f.ctx, tx, items)
		return err
	}))
}

func TestPurge_ForgetsKeysOlderThanTheAgeAndNoOthers(t *testing.T) {
	t.Parallel()
	f := open(t)
	clock := pgtest.SetClock(t, f.pool, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	old := f.mustEnqueue(process{"old"}, key("old"))
	clock.Advance(time.Microsecond)
	young := f.mustEnqueue(process{"young"}, key("young"))
	clock.Advance(time.Hour)

	told, err := purge.JobKeys.Delete(f.ctx, f.pool, purge.Options{OlderThan: time.Hour, DryRun: true})
	require.NoError(t, err)
	require.EqualValues(t, 1, told)
	deleted, err := purge.JobKeys.Delete(f.ctx, f.pool, purge.Options{OlderThan: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted)
	f.requireCounts(2, 1)

	// An old key looks new, also for other args, and its first job is still there.
	again := f.mustEnqueue(process{"other"}, key("old"))
	require.True(t, again.Created)
	require.NotEqual(t, old.JobID, again.JobID)
	require.Equal(t, jobs.Result{JobID: young.JobID}, f.mustEnqueue(process{"young"}, key("young")))
	f.requireCounts(3, 2)
}

func TestPurge_SeveralAtOnceForgetEachKeyOnce(t *testing.T) {
	t.Parallel()
	// Above read committed by default, where passing over rows would fail.
	pool := database(t, map[string]string{"default_transaction_isolation": "serializable"})
	f := on(t, pool, jobs.Config{}, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	clock := pgtest.SetClock(t, f.pool, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	for i := range 5 {
		f.keys(fmt.Sprint("old", i, "-"), 200) // 200 of the same microsecond
		clock.Advance(time.Second)
	}
	clock.Advance(time.Hour)
	f.keys("young", 7)

	var total, calls atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() {
			deleted, err := purge.JobKeys.Delete(f.ctx, f.pool, purge.Options{
				OlderThan: time.Hour, Batch: 30, Progress: func(int64) { calls.Add(1) },
			})
			total.Add(deleted)
			errs[i] = err
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.Equal(t, int64(1000), total.Load())
	require.GreaterOrEqual(t, calls.Load(), int64(34))
	f.requireCounts(1007, 7)
}

func TestPurge_EnqueueOfAKeyBeingForgottenWaitsAndMakesANewJob(t *testing.T) {
	t.Parallel()
	f := open(t)
	clock := pgtest.SetClock(t, f.pool, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	first := f.mustEnqueue(process{"a"}, key("k"))
	clock.Advance(time.Hour)

	other, enqueue := f.begin(pgx.ReadCommitted), f.begin(pgx.ReadCommitted)
	_, err := other.Exec(f.ctx, "select metered.purge_job_keys(null, metered.clock(), 10)")
	require.NoError(t, err)
	enqueuePID := pid(t, enqueue)
	results := make(chan jobs.Result, 1)
	go func() {
		result, err := f.Enqueue(f.ctx, enqueue, process{"a"}, key("k"))
		if err == nil {
			results <- result
		}
		close(results)
	}()
	f.untilBlocked(enqueuePID)

	// Another purge passes by.
	deleted, err := purge.JobKeys.Delete(f.ctx, f.pool, purge.Options{OlderThan: time.Minute})
	require.NoError(t, err)
	require.Zero(t, deleted)

	require.NoError(t, other.Commit(f.ctx))
	result := <-results
	require.True(t, result.Created)
	require.NotEqual(t, first.JobID, result.JobID)
	require.NoError(t, enqueue.Commit(f.ctx))
	f.requireCounts(2, 1)
}

// An enqueue can find a key taken, and a purge can delete it before the enqueue reads the job behind it.
// The short form finds an enqueue that does not take the key then.
func TestPurge_InTheMiddleOfAnEnqueueIsNotAnError(t *testing.T) {
	t.Parallel()
	f := open(t)
	stop := make(chan struct{})
	var purger, enqueuers sync.WaitGroup
	var purgeErr error
	purger.Go(func() {
		for purgeErr == nil {
			select {
			case <-stop:
				return
			default:
				_, purgeErr = f.pool.Exec(f.ctx, "select metered.purge_job_keys(null, 'infinity', 10)")
			}
		}
	})
	errs := make([]error, 6)
	for i := range errs {
		enqueuers.Go(func() {
			for range pgtest.Size(60, 200) {
				if _, errs[i] = f.enqueue(process{"a"}, key("k")); errs[i] != nil {
					return
				}
			}
		})
	}
	enqueuers.Wait()
	close(stop)
	purger.Wait()
	require.NoError(t, purgeErr)
	require.NoError(t, errors.Join(errs...))
}

package jobs_test

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestEnqueue_KeyUsedTwiceInOneTransactionMakesOneJob(t *testing.T) {
	t.Parallel()
	f := open(t)
	tx := f.begin(pgx.ReadCommitted)

	first, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
	require.NoError(t, err)
	require.True(t, first.Created)
	require.Equal(t, first.JobID, first.Job.ID)
	second, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
	require.NoError(t, err)
	require.Equal(t, jobs.Result{JobID: first.JobID}, second)

	require.NoError(t, tx.Commit(f.ctx))
	f.requireCounts(1, 1)
	require.Equal(t, "process", f.job(first.JobID).Kind)
}

// A key that is known is found by the short way alone, with a lock_timeout and without, at each level.
func TestEnqueue_AKnownKeyIsInsertedOnce(t *testing.T) {
	t.Parallel()
	f := open(t)
	tx := f.begin(pgx.ReadCommitted)
	first, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(f.ctx))
	pgtest.Execute(t, f.pool, "alter function metered.claim_job_key rename to claim_job_key_was")
	for _, level := range isolationLevels {
		for _, timeout := range []string{"0", "1000"} {
			tx := f.begin(level)
			_, err = tx.Exec(f.ctx, "select set_config('lock_timeout', $1, true)", timeout)
			require.NoError(t, err)
			again, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
			require.NoError(t, err)
			require.Equal(t, jobs.Result{JobID: first.JobID}, again)
			require.NoError(t, tx.Commit(f.ctx))
		}
	}
	f.requireCounts(1, 1)
}

func TestEnqueue_NothingIsLeftByARollbackOfItOrOfASavepoint(t *testing.T) {
	t.Parallel()
	f := open(t)
	tx := f.begin(pgx.ReadCommitted)
	_, err := f.Enqueue(f.ctx, tx, process{"a"}, key("k"))
	require.NoError(t, err)
	f.requireCounts(0, 0) // nothing before COMMIT
	_, err = f.Find(f.ctx, f.pool, "", "k")
	require.ErrorIs(t, err, jobs.ErrNotFound)
	require.NoError(t, tx.Rollback(f.ctx))
	f.requireCounts(0, 0)

	tx = f.begin(pgx.ReadCommitted)
	savepoint, err := tx.Begin(f.ctx)
	require.NoError(t, err)
	_, err = f.Enqueue(f.ctx, savepoint, process{"a"}, key("k"))
	require.NoError(t, err)
	require.NoError(t, savepoint.Rollback(f.ctx))
	again, err := f.Enqueue(f.ctx, tx, process{"b"}, key("k"))
	require.NoError(t, err)
	require.True(t, again.Created, "the key is free again")
	require.NoError(t, tx.Commit(f.ctx))
	f.requireCounts(1, 1)
}

func TestEnqueue_KeyOutlivesItsJob(t *testing.T) {
	t.Parallel()
	f := open(t)

	deleted := f.mustEnqueue(process{"a"}, key("deleted"))
	_, err := f.client.JobDelete(f.ctx, deleted.JobID)
	require.NoError(t, err)
	again := f.mustEnqueue(process{"a"}, key("deleted"))
	require.Equal(t, jobs.Result{JobID: deleted.JobID}, again)

	cancelled := f.mustEnqueue(process{"a"}, key("cancelled"))
	_, err = f.client.JobCancel(f.ctx, cancelled.JobID)
	require.NoError(t, err)
	again = f.mustEnqueue(process{"a"}, key("cancelled"))
	require.Equal(t, jobs.Result{JobID: cancelled.JobID}, again)

	f.requireCounts(1, 2)
}

func TestEnqueue_KeyUsedForSomethingElseIsAConflict(t *testing.T) {
	t.Parallel()
	f := open(t)
	first := f.mustEnqueue(process{"a"}, &jobs.Options{Key: "k", Tenant: "acme"})

	for differs, again := range map[string]jobs.Item{
		"kind":   {Args: discard{"a"}, Options: &jobs.Options{Key: "k", Tenant: "acme"}},
		"args":   {Args: process{"b"}, Options: &jobs.Options{Key: "k", Tenant: "acme"}},
		"tenant": {Args: process{"a"}, Options: &jobs.Options{Key: "k", Tenant: "zeta"}},
	} {
		tx := f.begin(pgx.ReadCommitted)
		_, err := f.Enqueue(f.ctx, tx, again.Args, again.Options)
		var conflict *jobs.ConflictError
		require.ErrorAs(t, err, &conflict)
		require.ErrorIs(t, err, jobs.ErrConflict)
		require.Equal(t, "job_conflict", metered.Code(err))
		require.Equal(t, &jobs.ConflictError{Queue: "default", Key: "k", JobID: first.JobID, Differs: differs}, conflict)
		require.NotContains(t, err.Error(), "acme")

		// It is an answer: the transaction goes on.
		_, err = f.Enqueue(f.ctx, tx, process{"a"}, nil)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(f.ctx))
	}
	f.requireCounts(4, 1)
}

func TestEnqueue_OptionsAreNotComparedUnderAKey(t *testing.T) {
	t.Parallel()
	f := open(t)
	first := f.mustEnqueue(process{"a"}, key("k"))
	again := f.mustEnqueue(process{"a"}, &jobs.Options{Key: "k", InsertOpts: river.InsertOpts{Priority: 4, Tags: []string{"late"}}})
	require.Equal(t, first.JobID, again.JobID)
	require.Equal(t, 1, f.job(first.JobID).Priority)
}

func TestEnqueue_KeyBelongsToTheQueueThatRiverChooses(t *testing.T) {
	t.Parallel()
	f := open(t)
	args := routed{Asset: "a", opts: river.InsertOpts{Queue: "media", Priority: 3}}

	byArgs := f.mustEnqueue(args, key("k"))
	require.Equal(t, "media", f.job(byArgs.JobID).Queue)
	require.Equal(t, 3, f.job(byArgs.JobID).Priority)
	record, err := f.Find(f.ctx, f.pool, "media", "k")
	require.NoError(t, err)
	require.Equal(t, byArgs.JobID, record.ID)

	again := f.mustEnqueue(args, &jobs.Options{Key: "k", InsertOpts: river.InsertOpts{Queue: "media"}})
	require.Equal(t, jobs.Result{JobID: byArgs.JobID}, again)

	overridden := f.mustEnqueue(args, &jobs.Options{Key: "k", InsertOpts: river.InsertOpts{Queue: "urgent"}})
	require.True(t, overridden.Created)
	require.Equal(t, "urgent", f.job(overridden.JobID).Queue)

	args.opts.Queue = ""
	byDefault := f.mustEnqueue(args, key("k"))
	require.True(t, byDefault.Created)
	require.Equal(t, river.QueueDefault, f.job(byDefault.JobID).Queue)
	f.requireCounts(3, 3)
}

func TestEnqueue_RiversOptionsPassThrough(t *testing.T) {
	t.Parallel()
	f := open(t)
	at := time.Now().Add(48 * time.Hour).UTC().Truncate(time.Second)
	opts := jobs.Options{Tenant: "acme", InsertOpts: river.InsertOpts{
		MaxAttempts: 7, Priority: 2, Queue: "media", ScheduledAt: at, Tags: []string{"one", "two"},
		Metadata: []byte(`{"trace": "t-1", "nested": {"n": 1}}`),
	}}
	for k, metadata := range map[string]string{
		"":  `{"trace": "t-1", "nested": {"n": 1}, "metered:tenant": "acme"}`,
		"k": `{"trace": "t-1", "nested": {"n": 1}, "metered:tenant": "acme", "metered:key": "k"}`,
	} {
		opts.Key = k
		job := f.job(f.mustEnqueue(process{"a"}, &opts).JobID)
		require.Equal(t, 7, job.MaxAttempts)
		require.Equal(t, 2, job.Priority)
		require.Equal(t, "media", job.Queue)
		require.Equal(t, rivertype.JobStateScheduled, job.State)
		require.True(t, at.Equal(job.ScheduledAt))
		require.Equal(t, []string{"one", "two"}, job.Tags)
		require.JSONEq(t, `{"asset": "a"}`, string(job.EncodedArgs))
		require.Equal(t, "acme", jobs.Of(job).Tenant)
		require.Equal(t, k, jobs.Of(job).Key)
		require.JSONEq(t, metadata, string(job.Metadata))
	}
	pending := f.mustEnqueue(process{"a"}, &jobs.Options{Key: "p", InsertOpts: river.InsertOpts{Pending: true}})
	require.Equal(t, rivertype.JobStatePending, f.job(pending.JobID).State)
	plain := f.job(f.mustEnqueue(process{"a"}, nil).JobID)
	require.JSONEq(t, `{}`, string(plain.Metadata))
	require.Equal(t, "", jobs.Of(plain).Tenant+jobs.Of(plain).Key)
}

func TestEnqueue_RiversUniqueOptionsWorkWithoutAKey(t *testing.T) {
	t.Parallel()
	f := open(t)
	unique := &jobs.Options{Tenant: "acme", InsertOpts: river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}}
	first := f.mustEnqueue(process{"a"}, unique)
	require.True(t, first.Created)
	again := f.mustEnqueue(process{"a"}, unique)
	require.False(t, again.Created)
	require.Equal(t, first.JobID, again.JobID)
	require.True(t, f.mustEnqueue(process{"b"}, unique).Created)
	f.requireCounts(2, 0)
}

func TestEnqueue_DigestIsStable(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.mustEnqueue(process{"a"}, key("k"))
	var stored []byte
	require.NoError(t, f.pool.QueryRow(f.ctx, "select digest from metered.job_keys").Scan(&stored))
	hash := sha256.Sum256([]byte("metered/job\x00\x00\x00\x00\x00\x00\x00\x07process" + `{"asset":"a"}`))
	require.Equal(t, "01"+hex.EncodeToString(hash[:]), hex.EncodeToString(stored))
	const golden = "01c202c9dd5adcbf533ba9fba9c2e44a5300fbc9d5667021ad41288f529fefc895"
	require.Equal(t, golden, hex.EncodeToString(stored), "stored digests must stay comparable")
}

func TestEnqueue_FollowsTheSchemasOfRiverAndOfTheLibrary(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := open(t)
	_, err := metered.Migrate(f.ctx, f.pool, metered.MigrateOptions{Schema: "other_name"})
	require.NoError(t, err)
	_, err = f.pool.Exec(f.ctx, `create schema "RiverJobs"`)
	require.NoError(t, err)
	migrator, err := rivermigrate.New(riverpgxv5.New(f.pool), &rivermigrate.Config{Schema: "RiverJobs"})
	require.NoError(t, err)
	_, err = migrator.Migrate(f.ctx, rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	_, err = f.pool.Exec(f.ctx, `select setval('"RiverJobs".river_job_id_seq', 1000)`)
	require.NoError(t, err)

	other := on(t, f.pool, jobs.Config{Schema: "other_name"},
		&river.Config{Schema: "RiverJobs", Plugins: []rivertype.Plugin{jobs.Plugin()}})
	first := other.mustEnqueue(process{"a"}, key("k"))
	require.Equal(t, int64(1001), first.JobID)
	require.Equal(t, first.JobID, other.job(first.JobID).ID)
	require.Equal(t, jobs.Result{JobID: 1001}, other.mustEnqueue(process{"a"}, key("k")))
	f.requireCounts(0, 0)
}

func TestFind_ReturnsTheRememberedJob(t *testing.T) {
	t.Parallel()
	f := open(t)
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	pgtest.SetClock(t, f.pool, now)
	first := f.mustEnqueue(process{"a"}, &jobs.Options{Key: "k", Tenant: "acme"})
	record, err := f.Find(f.ctx, f.pool, "", "k")
	require.NoError(t, err)
	require.True(t, now.Equal(record.ClaimedAt))
	record.ClaimedAt = time.Time{}
	require.Equal(t, jobs.Enqueued{Queue: "default", Key: "k", ID: first.JobID, Kind: "process", Tenant: "acme"}, record)

	_, err = f.Find(f.ctx, f.pool, "media", "k")
	require.ErrorIs(t, err, jobs.ErrNotFound)
	require.Equal(t, "job_key_not_found", metered.Code(err))
}

func (raw) Kind() string { return "raw" }

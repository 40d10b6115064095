package jobs_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestEnqueueMany_MixesNewKnownRepeatedAndNoKeys(t *testing.T) {
	t.Parallel()
	f := open(t)
	known := f.mustEnqueue(process{"known"}, key("known"))
	items := []jobs.Item{
		{Args: process{"z"}, Options: key("z")},
		{Args: process{"none"}},
		{Args: process{"known"}, Options: key("known")},
		{Args: discard{"a"}, Options: &jobs.Options{Key: "a", Tenant: "acme"}},
		{Args: process{"z"}, Options: key("z")},
		{Args: process{"z"}, Options: &jobs.Options{Key: "z", InsertOpts: river.InsertOpts{Queue: "bulk"}}},
		{Args: routed{Asset: "m", opts: river.InsertOpts{Queue: "media"}}, Options: &jobs.Options{Tenant: "acme"}},
	}
	tx := f.begin(pgx.ReadCommitted)
	results, err := f.EnqueueMany(f.ctx, tx, items)
	require.NoError(t, err)
	f.requireCounts(1, 1)
	require.NoError(t, tx.Commit(f.ctx))

	require.Len(t, results, len(items))
	ids := map[int64]bool{}
	for i, created := range []bool{true, true, false, true, false, true, true} {
		require.Equal(t, created, results[i].Created, "item %d", i)
		require.Equal(t, created, results[i].Job != nil)
		ids[results[i].JobID] = true
	}
	require.Len(t, ids, 6)
	require.Equal(t, known.JobID, results[2].JobID)
	require.Equal(t, results[0].JobID, results[4].JobID)
	for i, want := range map[int][4]string{
		0: {"process", `{"asset":"z"}`, "default", ""}, 1: {"process", `{"asset":"none"}`, "default", ""},
		3: {"discard", `{"asset":"a"}`, "default", "acme"}, 5: {"process", `{"asset":"z"}`, "bulk", ""},
		6: {"routed", `{"asset":"m"}`, "media", "acme"},
	} {
		job := f.job(results[i].JobID)
		require.Equal(t, want[0], job.Kind)
		require.JSONEq(t, want[1], string(job.EncodedArgs))
		require.Equal(t, want[2], job.Queue)
		require.Equal(t, want[3], jobs.Of(job).Tenant)
	}
	f.requireCounts(6, 4)

	again, err := f.EnqueueMany(f.ctx, f.begin(pgx.RepeatableRead), []jobs.Item{items[5], items[3], items[0]})
	require.NoError(t, err)
	require.Equal(t, []jobs.Result{{JobID: results[5].JobID}, {JobID: results[3].JobID}, {JobID: results[0].JobID}}, again)
}

func TestEnqueueMany_ConflictLeavesNothingToCommit(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.mustEnqueue(process{"a"}, key("k"))
	tx := f.begin(pgx.ReadCommitted)
	_, err := f.EnqueueMany(f.ctx, tx, []jobs.Item{
		{Args: process{"new"}, Options: key("new")},
		{Args: process{"b"}, Options: key("k")},
	})
	var conflict *jobs.ConflictError
	require.ErrorAs(t, err, &conflict)
	require.Equal(t, "k", conflict.Key)
	requireAborted(t, tx)

	// The two of one call can conflict with each other.
	tx = f.begin(pgx.ReadCommitted)
	_, err = f.EnqueueMany(f.ctx, tx, []jobs.Item{
		{Args: process{"x"}, Options: key("new")}, {Args: process{"y"}, Options: key("new")},
	})
	require.ErrorIs(t, err, jobs.ErrConflict)
	requireAborted(t, tx)
	f.requireCounts(1, 1)
}

func TestEnqueueMany_TakesThousands(t *testing.T) {
	t.Parallel()
	f := open(t)
	items := make([]jobs.Item, pgtest.Sizes(500, 2000, 5000))
	for i := range items {
		items[i] = jobs.Item{Args: process{fmt.Sprint(i)}, Options: key(fmt.Sprint(i))}
	}
	for _, created := range []bool{true, false} {
		tx := f.begin(pgx.ReadCommitted)
		results, err := f.EnqueueMany(f.ctx, tx, items)
		require.NoError(t, err)
		for i, r := range results {
			require.Equal(t, created, r.Created)
			if created {
				require.JSONEq(t, fmt.Sprintf(`{"asset": "%d"}`, i), string(r.Job.EncodedArgs))
			}
		}
		require.NoError(t, tx.Commit(f.ctx))
	}
	f.requireCounts(len(items), len(items))
}

package jobs_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// work is the database's work of one call, with all that its functions do.
type work struct {
	Pages int64 `json:"Shared Hit Blocks"`
	Read  int64 `json:"Shared Read Blocks"`
	WAL   int64 `json:"WAL Bytes"`
	Full  int64 `json:"WAL FPI"`
}

func (g *gated) work(sql string) work {
	g.t.Helper()
	var raw []byte
	require.NoError(g.t, g.pool.QueryRow(g.ctx, "explain (analyze, buffers, wal, format json) "+sql).Scan(&raw))
	var plans []struct{ Plan work }
	require.NoError(g.t, json.Unmarshal(raw, &plans))
	w := plans[0].Plan
	w.Pages += w.Read
	return w
}

// To park a job, and to let the next one start when units are free, is the same work for many parked jobs as for few.
func TestPlans_AParkedJobIsTheSameWorkHoweverManyWait(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	var few work
	for _, n := range []int{pgtest.Size(300, 1000), pgtest.Size(1500, 100_000)} {
		g := openGated(t, nil)
		_, err := g.pool.Exec(g.ctx, "alter table metered.parked_jobs set (autovacuum_enabled = off); alter table metered.parked_scopes set (autovacuum_enabled = off)")
		require.NoError(t, err)
		first := g.mustEnqueue(process{"first"}, needs(slots("gpu", 1, 1)))
		for at := 0; at < n; at += 1000 {
			var items []jobs.Item
			for i := range min(1000, n-at) {
				o := needs(slots("gpu", 1, 1))
				o.FairKey = fmt.Sprint(i % 50)
				items = append(items, jobs.Item{Args: process{"waits"}, Options: o})
			}
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error { _, err := g.EnqueueMany(g.ctx, tx, items); return err })
		}
		require.Zero(t, g.release().Released)
		_, err = g.pool.Exec(g.ctx, "checkpoint")
		require.NoError(t, err)

		const release = "select * from metered.release_jobs(null, null, 5000, 64, interval '1 minute', null, null)"
		var all work
		last := jobs.Of(first.Job).Hold
		for i := range 20 { // the first ones write full pages
			g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
				_, err := g.book.Release(g.ctx, tx, holds.Release{IDs: []string{last}})
				return err
			})
			if w := g.work(release); i > 9 {
				all.Pages, all.WAL = all.Pages+w.Pages, all.WAL+w.WAL-w.Full*8192
			}
			last = pgtest.Value[string](t, g.pool, "select id from metered.holds where pending order by no desc limit 1")
		}
		if n >= 1500 {
			t.Logf("for ten jobs, of few parked %+v, of %d %+v", few, n, all)
			// Trees are a level higher, and rows that ended are not all pruned. Work for each parked job would be five times as much, and more.
			require.LessOrEqual(t, float64(all.Pages), 1.5*float64(few.Pages))
			require.LessOrEqual(t, float64(all.WAL), 1.5*float64(few.WAL))
		}
		few = all
	}
}

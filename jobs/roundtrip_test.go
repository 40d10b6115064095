package jobs_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestEnqueue_RoundTrips(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, w := pgtest.Tap(t, pgtest.Open(t), func(c *pgxpool.Config) { c.MaxConns = 1 })
	// River notifies a queue once per cooldown, so here once.
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	f := on(t, pool, jobs.Config{Holds: book}, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}, FetchCooldown: time.Hour, FetchPollInterval: time.Hour})
	many := func(prefix string) []jobs.Item {
		return []jobs.Item{{Args: process{"a"}, Options: key(prefix + "1")}, {Args: process{"a"}}, {Args: process{"a"}, Options: key(prefix + "2")}}
	}
	warm := f.begin(pgx.ReadCommitted)
	_, err = f.Enqueue(f.ctx, warm, process{"a"}, key("known"))
	require.NoError(t, err)
	gated, keyed := needs(slots("gpu", 1, 10)), needs(slots("gpu", 1, 10))
	keyed.Key = "known gated"
	for _, o := range []*jobs.Options{gated, keyed} {
		_, err = f.Enqueue(f.ctx, warm, process{"a"}, o)
		require.NoError(t, err)
	}
	keyed.Key = "new gated"
	_, err = f.EnqueueMany(f.ctx, warm, many("known"))
	require.NoError(t, err)
	require.NoError(t, warm.Commit(f.ctx))

	tx := f.begin(pgx.ReadCommitted)
	count := func(call func() error) int {
		w.Each(nil)
		require.NoError(t, call())
		return len(w.Sent())
	}
	enqueue := func(opts *jobs.Options) func() error {
		return func() error { _, err := f.Enqueue(f.ctx, tx, process{"a"}, opts); return err }
	}
	enqueueMany := func(items []jobs.Item) func() error {
		return func() error { _, err := f.EnqueueMany(f.ctx, tx, items); return err }
	}
	require.Equal(t, 1, count(enqueue(nil)), "without a key")
	require.Equal(t, 2, count(enqueue(key("new"))), "a new key")
	require.Equal(t, 1, count(enqueue(key("known"))), "a known key")
	require.Equal(t, 2, count(enqueueMany(many("new"))), "many")
	require.Equal(t, 1, count(enqueue(gated)), "with a hold")
	require.Equal(t, 2, count(enqueue(keyed)), "with a hold and a new key")
}

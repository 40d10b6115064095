package jobs_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestEnqueue_RoundTrips(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, w := pgtest.Tap(t, pgtest.Open(t), func(c *pgxpool.Config) { c.MaxConns = 1 })
	// River notifies a queue once per cooldown, so here once.
	f := on(t, pool, jobs.Config{}, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}, FetchCooldown: time.Hour, FetchPollInterval: time.Hour})
	many := func(prefix string) []jobs.Item {
		return []jobs.Item{{Args: process{"a"}, Options: key(prefix + "1")}, {Args: process{"a"}}, {Args: process{"a"}, Options: key(prefix + "2")}}
	}
	warm := f.begin(pgx.ReadCommitted)
	_, err := f.Enqueue(f.ctx, warm, process{"a"}, key("known"))
	require.NoError(t, err)
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
}

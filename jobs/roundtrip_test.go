package jobs_test

import (
	"context"
	"net"
	"sync/atomic"
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

// wire counts round trips: reads that follow a write.
type wire struct {
	net.Conn
	wrote atomic.Bool
	trips *atomic.Int64
}

func (w *wire) Write(b []byte) (int, error) {
	w.wrote.Store(true)
	return w.Conn.Write(b)
}

func (w *wire) Read(b []byte) (int, error) {
	if w.wrote.Swap(false) {
		w.trips.Add(1)
	}
	return w.Conn.Read(b)
}

func TestEnqueue_RoundTrips(t *testing.T) {
	t.Parallel()
	var trips atomic.Int64
	pool := pgtest.OpenWith(t, pgtest.Options{MaxConns: 1, Config: func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &wire{Conn: conn, trips: &trips}, err
		}
	}})
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
	count := func(call func() error) int64 {
		before := trips.Load()
		require.NoError(t, call())
		return trips.Load() - before
	}
	enqueue := func(opts *jobs.Options) func() error {
		return func() error { _, err := f.Enqueue(f.ctx, tx, process{"a"}, opts); return err }
	}
	enqueueMany := func(items []jobs.Item) func() error {
		return func() error { _, err := f.EnqueueMany(f.ctx, tx, items); return err }
	}
	require.Equal(t, int64(1), count(enqueue(nil)), "without a key")
	require.Equal(t, int64(2), count(enqueue(key("new"))), "a new key")
	require.Equal(t, int64(1), count(enqueue(key("known"))), "a known key")
	require.Equal(t, int64(2), count(enqueueMany(many("new"))), "many")
}

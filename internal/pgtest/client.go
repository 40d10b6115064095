package pgtest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
)

// SetUp opens a database with a table for a caller's own rows, uploads (name), and a client of it.
func SetUp(t testing.TB, cfg metered.Config, opts ...Options) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	pool := OpenWith(t, append(opts, Options{})[0])
	if _, err := pool.Exec(t.Context(), `create table uploads (name text primary key)`); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return pool, NewClient(t, pool, cfg)
}

// NewClient returns a client of pool that can enqueue. It waits a minute for locks unless cfg says
// otherwise, since five seconds can pass on a busy machine in a test that is not about them.
func NewClient(t testing.TB, pool *pgxpool.Pool, cfg metered.Config) *metered.Client {
	t.Helper()
	if cfg.LockTimeout == 0 {
		cfg.LockTimeout = time.Minute
	}
	var err error
	cfg.River, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()},
		// River notifies a queue once per cooldown: once per client, so that round trips can be
		// counted.
		FetchCooldown: time.Hour, FetchPollInterval: time.Hour,
	})
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	c, err := metered.New(pool, cfg)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return c
}

// LockScope holds the lock of a scope until the returned function is called.
func LockScope(t testing.TB, pool *pgxpool.Pool, c *metered.Client, scope string) (release func()) {
	t.Helper()
	tx, err := pool.Begin(context.Background())
	if err == nil {
		err = c.Budget.Lock(context.Background(), tx, scope)
	}
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	release = func() { _ = tx.Rollback(context.Background()) }
	t.Cleanup(release)
	return release
}

// RequireVerified checks that a ledger adds up.
func RequireVerified(t testing.TB, pool *pgxpool.Pool, ledger *budget.Ledger) {
	t.Helper()
	report, err := ledger.Verify(t.Context(), pool, budget.VerifyOptions{})
	if err != nil || len(report.Differences) > 0 {
		t.Fatalf("pgtest: the ledger does not add up: %v %v", report.Differences, err)
	}
}

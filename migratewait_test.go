package metered_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// A long transaction of the application's has a table: Migrate says so, and lets go again and again, so that nobody waits for
// long behind it.
func TestMigrate_LetsOthersThroughWhileItWaitsForATable(t *testing.T) {
	t.Parallel()
	earlierVersions(t, func(t *testing.T, version int) {
		ctx := t.Context()
		pool := pgtest.OpenVersion(t, version)
		long := pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "a long report" })
		tx, err := long.Begin(ctx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, "lock table metered.schema_version in share mode") // against which the new version's row waits
		require.NoError(t, err)

		waiting := make(chan string, 100)
		done := make(chan error, 1)
		go func() {
			_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{OnWait: func(_ context.Context, what string) { waiting <- what }})
			done <- err
		}()
		require.Contains(t, <-waiting, "metered.schema_version, which process ")
		require.Contains(t, <-waiting, " holds (a long report), in a transaction since ")
		reading, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		_, err = pool.Exec(reading, "select from metered.ledger limit 1")
		require.NoError(t, err)

		// A second one says what it waits for, and gives up when its time is over.
		brief, cancel := context.WithTimeout(ctx, 2500*time.Millisecond)
		defer cancel()
		_, err = metered.Migrate(brief, pool, metered.MigrateOptions{})
		require.ErrorIs(t, err, metered.ErrBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "waiting for ")
		select {
		case err := <-done:
			t.Fatalf("it did not wait: %v", err)
		default:
		}
		require.Equal(t, version, validate(t, pool).Version)
		require.NoError(t, tx.Rollback(ctx))
		require.NoError(t, <-done)
		require.NoError(t, validate(t, pool).Err())
	})
}

func TestMigrate_SaysThatAnotherMigrationIsAtIt(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	other := pgtest.OpenVersion(t, 1) // its lock is another database's
	for _, p := range []*pgxpool.Pool{pool, other} {
		tx, err := p.Begin(ctx)
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(ctx, "select pg_advisory_xact_lock($1)", schema.MigrationLock)
		require.NoError(t, err)
	}
	brief, cancel := context.WithTimeout(ctx, 1500*time.Millisecond)
	defer cancel()
	_, err := metered.Migrate(brief, pool, metered.MigrateOptions{})
	require.ErrorIs(t, err, metered.ErrBusy)
	require.ErrorContains(t, err, "waiting for another migration, which process ")
}

// Many upgrade at once, and one of them does the work.
func TestMigrate_UpgradesOnce(t *testing.T) {
	t.Parallel()
	earlierVersions(t, func(t *testing.T, version int) {
		pool := pgtest.OpenVersion(t, version)
		var mu sync.Mutex
		from := make(map[int]int)
		inParallel(8, func(int) {
			report, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{River: true})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			from[report.From]++
		})
		require.Equal(t, map[int]int{version: 1, metered.SchemaVersion: 7}, from)
		require.NoError(t, validate(t, pool).Err())
	})
}

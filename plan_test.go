package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
)

// A sequential scan is what makes a hot table quadratic once it is in a cached
// plan; and where sequential scans are off, as they are in these functions, its
// cost makes Postgres compile it (jit), for 50 ms a command.
func TestDoTx_ScansNoTableSequentially(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			ctx := t.Context()
			cmd := whole(t, pool, c, "op")
			cmd.IssuedAt = time.Now()
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			for range 2 { // the second is a replay
				_, err = metered.DoTx(ctx, c, tx, cmd, wholeFunc("op", nil))
				require.NoError(t, err)
			}
			queryRow[int](t, tx, `select metered.purge_operations(now() - interval '1 hour', 100)`)
			rows, err := tx.Query(ctx, `select relname::text from pg_stat_xact_user_tables where schemaname = 'metered' and seq_scan > 0`)
			require.NoError(t, err)
			scanned, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Empty(t, scanned)
			require.NotZero(t, queryRow[int](t, tx, `select sum(idx_scan) from pg_stat_xact_user_tables where schemaname = 'metered'`))
		})
	}
}

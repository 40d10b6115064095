package metered_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
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
			queryRow[int](t, tx, `select deleted from metered.purge_operations(null, now() - interval '1 hour', 100, 1000)`)
			rows, err := tx.Query(ctx, `select relname::text from pg_stat_xact_user_tables where schemaname = 'metered' and seq_scan > 0`)
			require.NoError(t, err)
			scanned, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Empty(t, scanned)
			require.NotZero(t, queryRow[int](t, tx, `select sum(idx_scan) from pg_stat_xact_user_tables where schemaname = 'metered'`))
		})
	}
}

// A purge reads what it deletes, once, with a plan of when there was little, and also
// while an old snapshot keeps what it deleted before.
func TestPurgeOperations_ReadsWhatItDeletes(t *testing.T) {
	t.Parallel()
	for _, rows := range []int{0, 30, 300} {
		for _, analysed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d rows, analysed %v", rows, analysed), func(t *testing.T) {
				t.Parallel()
				pool, ctx := pgtest.Open(t), t.Context()
				conn, err := pool.Acquire(ctx)
				require.NoError(t, err)
				defer conn.Release()
				exec := func(sql string, args ...any) {
					_, err := conn.Exec(ctx, sql, args...)
					require.NoError(t, err)
				}
				record := func(n int, name, age string) {
					exec(`insert into metered.operations (namespace, id, at, fingerprint, result)
						select '', $2 || g, now() - $3::interval + g * interval '1 us', '', '' from generate_series(1, $1::int) g`, n, name, age)
				}
				purge := func(after *time.Time) (deleted int64, last *time.Time) {
					require.NoError(t, conn.QueryRow(ctx, `select deleted, last from metered.purge_operations($1, now() - interval '1 h', 100, 1000)`,
						after).Scan(&deleted, &last))
					return deleted, last
				}
				reads := func() int64 {
					pgtest.FlushStatistics(t, conn)
					return queryRow[int64](t, conn, `select sum(i.idx_tup_read + 1000000 * s.seq_scan)::bigint from pg_stat_user_indexes i
						join pg_stat_user_tables s using (relid) where i.relname = 'operations'`)
				}
				exec(`alter table metered.operations set (autovacuum_enabled = off)`)
				record(rows, "first ", "0")
				if analysed {
					exec(`analyze metered.operations`)
				}
				for range 7 {
					purge(nil)
				}
				record(2000, "old ", "2 h")
				record(5000, "young ", "0")

				old, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
				require.NoError(t, err)
				defer old.Rollback(context.Background())
				queryRow[int](t, old, `select count(*) from metered.operations`)
				before := reads()
				var total int64
				for deleted, last := purge(nil); deleted > 0; deleted, last = purge(last) {
					total += deleted
				}
				require.EqualValues(t, 2000, total)
				require.LessOrEqual(t, reads()-before, int64(2*2000))
			})
		}
	}
}

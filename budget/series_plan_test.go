package budget_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The plans of a connection's first calls, made while there is nothing, are right for a million entries with refunds: no
// scan of a table, and about as many pages for a month by day as with a hundred entries.
func TestPlans_OfSeriesReadAsMuchOfManyEntriesAsOfAHundred(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	tables := []string{"ledger", "refund_sum", "leases", "lease_spends"}
	pages, entries := map[int]int64{}, map[int]int64{}
	most := pgtest.Size(60_000, 1_000_000)
	for _, size := range []int{100, most} {
		pool, l, _ := open(t)
		for _, table := range tables {
			execute(t, pool, "alter table metered."+table+" set (autovacuum_enabled = off)")
		}
		conn, err := pool.Acquire(ctx)
		require.NoError(t, err)
		month := func() int64 {
			days, err := l.Series(ctx, conn, "a", start, start.AddDate(0, 1, 0), budget.Day, nil)
			require.NoError(t, err)
			require.Len(t, days, 31)
			sum := int64(0)
			for _, u := range days {
				sum += u.Used()
			}
			return sum
		}
		for range 10 {
			require.Zero(t, month())
		}
		execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
			select g, 1, $2::timestamptz + (g - 1) * interval '31 days' / $1::bigint, g, 0, 0, 0, 0, 'c', 'a' from generate_series(1, $1::bigint) g`, size, start)
		_, err = conn.Exec(ctx, `select count(metered.refund('a', null, g, 1, 1000, null, false)) from generate_series(1, $1::bigint, $1 / 50) g`, size)
		require.NoError(t, err)
		require.EqualValues(t, size-50, month())
		scans := func() (n int64) {
			for _, table := range tables {
				n += tableStat(t, conn, table, "seq_scan")
			}
			return n
		}
		scanned, read := scans(), indexReads(t, conn)
		month()
		entries[size] = indexReads(t, conn) - read
		require.Equal(t, scanned, scans())
		pages[size] = pagesOf(t, conn, `select * from metered.usage_before('a', array(
			select timestamptz '2026-01-01 00:00:00+00' + d * interval '24 hours' from generate_series(0, 31) d))`)
		conn.Release()
	}
	t.Logf("a month by day of 100 and of %d entries: %d and %d pages, %d and %d index entries",
		most, pages[100], pages[most], entries[100], entries[most])
	// One level more of the ledger's indexes, and three more of the sums of refunds.
	require.LessOrEqual(t, pages[most], 4*pages[100])
	require.LessOrEqual(t, pages[most], int64(31*60))
	require.LessOrEqual(t, entries[most], 4*entries[100])
}

// pagesOf is how many pages a query looks at.
func pagesOf(t testing.TB, conn *pgxpool.Conn, sql string) int64 {
	t.Helper()
	var plans []struct {
		Plan struct {
			Hit  int64 `json:"Shared Hit Blocks"`
			Read int64 `json:"Shared Read Blocks"`
		}
	}
	var text []byte
	require.NoError(t, conn.QueryRow(t.Context(), "explain (analyze, buffers, format json) "+sql).Scan(&text))
	require.NoError(t, json.Unmarshal(text, &plans))
	return plans[0].Plan.Hit + plans[0].Plan.Read
}

//go:build unix

package notary_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/notary"
)

// BenchmarkNotarize takes a million entries down, of 1,000 scopes and of 100,000, and checks them. Beside the time it reports what
// the processors did: of this process, and of its backends. Other work of the machine is not in that.
func BenchmarkNotarize(b *testing.B) {
	const entries = 1_000_000
	for _, scopes := range []int{1_000, 100_000} {
		b.Run(fmt.Sprintf("scopes=%d", scopes), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				pool := pgtest.Open(b)
				_, err := pool.Exec(b.Context(), `
insert into metered.ledger (scope, seq, amount, at, spent, refunded, credited, held, epoch, kind)
select 'org/' || s, n, 5, timestamptz '2026-05-05Z' + n * interval '1 s', 5 * n, 0, 0, 0, 0, 'c'
from generate_series(1, $1::bigint) s, generate_series(1, $2::bigint) n`, scopes, entries/scopes)
				require.NoError(b, err)
				_, err = pool.Exec(b.Context(), "vacuum analyze metered.ledger")
				require.NoError(b, err)
				office, err := notary.New(notary.Config{})
				require.NoError(b, err)
				signer, verifier := keys(b)
				backends, own := ofBackends(b, pool), ofProcess(b)
				b.StartTimer()
				head, err := office.Notarize(b.Context(), pool, signer)
				require.NoError(b, err)
				require.EqualValues(b, entries, head.Size)
				b.StopTimer()
				b.ReportMetric((ofProcess(b) - own).Seconds(), "own-cpu-s")
				b.ReportMetric((ofBackends(b, pool) - backends).Seconds(), "backend-cpu-s")
				report, err := office.Verify(b.Context(), pool, []byte(head.Note), verifier)
				require.NoError(b, err)
				require.Empty(b, report.Differences)
				require.EqualValues(b, entries, report.Checked)
				b.StartTimer()
			}
		})
	}
}

func ofProcess(b *testing.B) time.Duration {
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// ofBackends is of the connections of a pool, on Linux, or 0.
func ofBackends(b *testing.B, pool *pgxpool.Pool) time.Duration {
	return time.Duration(pgtest.Value[int64](b, pool, `
select coalesce(sum(split_part(pg_read_file('/proc/' || pid || '/schedstat', 0, 200, true), ' ', 1)::bigint), 0)::bigint
from pg_stat_activity where datname = current_database() and backend_type = 'client backend' `))
}

package notary_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/notary"
)

// BenchmarkNotarize takes a million entries down, of 1,000 scopes and of 100,000, and checks them.
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
				b.StartTimer()
				head, err := office.Notarize(b.Context(), pool, signer)
				require.NoError(b, err)
				require.EqualValues(b, entries, head.Size)
				b.StopTimer()
				report, err := office.Verify(b.Context(), pool, []byte(head.Note), verifier)
				require.NoError(b, err)
				require.Empty(b, report.Differences)
				require.EqualValues(b, entries, report.Checked)
				b.StartTimer()
			}
		})
	}
}

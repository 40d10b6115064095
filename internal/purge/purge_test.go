package purge_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

func TestPurge_TakesOptionsJustWithinBounds(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for _, opts := range []purge.Options{{}, {OlderThan: purge.MinOlderThan, Batch: 10_000}, {OlderThan: bounds.MaxWindow, Batch: 1}} {
		for _, table := range []*purge.Table{purge.Holds, purge.Leases, purge.Tokens, purge.Operations, purge.JobKeys} {
			for _, opts.DryRun = range []bool{false, true} {
				n, err := table.Delete(t.Context(), pool, opts)
				require.NoError(t, err)
				require.Zero(t, n)
			}
		}
	}
}

package purge_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/tokens"
)

func TestCheck_RefusesOptionsJustOutOfBounds(t *testing.T) {
	t.Parallel()
	kind := fault.New("kind", "kind")
	for field, all := range map[string][]purge.Options{
		"PurgeOptions.OlderThan": {{}, {OlderThan: -time.Hour}, {OlderThan: time.Second - 1}, {OlderThan: bounds.MaxWindow + 1}},
		"PurgeOptions.Batch":     {{OlderThan: time.Hour, Batch: -1}, {OlderThan: time.Hour, Batch: 10_001}},
	} {
		for _, opts := range all {
			err := opts.Check(kind)
			var argument *fault.Argument
			require.ErrorAs(t, err, &argument, "%+v", opts)
			require.Equal(t, field, argument.Field)
			require.ErrorIs(t, err, kind)
		}
	}
}

func TestPurge_TakesOptionsJustWithinBounds(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	store, err := tokens.New(tokens.Config{})
	require.NoError(t, err)
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	for _, opts := range []purge.Options{{OlderThan: time.Second, Batch: 10_000}, {OlderThan: bounds.MaxWindow, Batch: 1}} {
		n, err := store.Purge(t.Context(), pool, tokens.PurgeOptions(opts))
		require.NoError(t, err)
		require.Zero(t, n)
		n, err = book.Purge(t.Context(), pool, holds.PurgeOptions(opts))
		require.NoError(t, err)
		require.Zero(t, n)
	}
}

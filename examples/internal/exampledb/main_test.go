package exampledb_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
)

func TestAdmitted_MakesBusyCallsAgainAndCountsTheRest(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	var first [4]atomic.Bool
	admitted, refused, err := exampledb.Admitted(4, func(i int) error {
		if first[i].CompareAndSwap(false, true) {
			return fmt.Errorf("call %d: %w", i, budget.ErrBusy)
		}
		return []error{nil, nil, budget.ErrExceeded, broken}[i]
	})
	require.Equal(t, []int{2, 1}, []int{admitted, refused})
	require.ErrorIs(t, err, broken)
	require.NotErrorIs(t, err, budget.ErrBusy)
}

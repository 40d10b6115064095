package budget

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTellDenied_CostsNothingWithoutAnObserverOrADenial(t *testing.T) {
	denied := error(&ExceededError{Refusals: make([]Refusal, 3)})
	require.Zero(t, testing.AllocsPerRun(100, func() {
		tellDenied(t.Context(), nil, denied)
		tellDenied(t.Context(), nil, nil)
	}))
}

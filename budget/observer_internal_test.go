package budget

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// No word has a scope in it, nor anything else that has many values.
func TestLimit_WithoutANameIsObservedByItsWindowOrPeriod(t *testing.T) {
	for word, limit := range map[string]Limit{
		"daily": PerWindow(1, time.Hour).Named("daily"), "1h0m0s": PerWindow(1, time.Hour), "lifetime": Lifetime(1), "credit": Prepaid(0),
		"month (UTC)": Per(1, Month, time.UTC, time.Time{}), "720h0m0s": PerPeriod(1, 720*time.Hour, time.Unix(0, 0)),
	} {
		require.Equal(t, word, limit.word())
	}
}

func TestTellRefused_CostsNothingWithoutAnObserverOrARefusal(t *testing.T) {
	refused := error(&ExceededError{Refusals: make([]Refusal, 3)})
	require.Zero(t, testing.AllocsPerRun(100, func() {
		tellRefused(t.Context(), nil, refused)
		tellRefused(t.Context(), nil, nil)
	}))
}

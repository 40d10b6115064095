package metered

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

func TestRefusals_ForgetAScopeAfterOneToTwoTurns(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	refused := func(scope string) error {
		return fmt.Errorf("wrapped: %w", &budget.ExceededError{Refusals: []budget.Refusal{{Scope: scope}}})
	}
	seen := func(r *refusals, after time.Duration, scope string) bool {
		return r.seen(start.Add(after), []budget.Charge{{Scope: "other"}, {Scope: scope}})
	}
	r := &refusals{}
	require.False(t, seen(r, 0, "a"))
	r.add(start, refused("a"))
	r.add(start, nil)
	r.add(start, budget.ErrBusy)
	require.True(t, seen(r, refusalsTurn-1, "a"))
	require.False(t, seen(r, refusalsTurn-1, "b"))
	r.add(start.Add(refusalsTurn), refused("b"))
	require.True(t, seen(r, 2*refusalsTurn-1, "a"))
	require.False(t, seen(r, 2*refusalsTurn, "a"))
	require.True(t, seen(r, 2*refusalsTurn, "b"))
	require.False(t, seen(r, 4*refusalsTurn, "b"))

	for i := range 3 * maxRefusals {
		r.add(start.Add(5*refusalsTurn), refused(fmt.Sprint(i)))
	}
	require.LessOrEqual(t, len(r.young)+len(r.old), 2*maxRefusals)
}

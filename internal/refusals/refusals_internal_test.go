package refusals

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
	seen := func(r *Recent, after time.Duration, scope string) bool {
		return r.Seen(start.Add(after), []budget.Charge{{Scope: "other"}, {Scope: scope}})
	}
	r := &Recent{}
	require.False(t, seen(r, 0, "a"))
	r.Add(start, refused("a"))
	r.Add(start, nil)
	r.Add(start, budget.ErrBusy)
	require.True(t, seen(r, turnLength-1, "a"))
	require.False(t, seen(r, turnLength-1, "b"))
	r.Add(start.Add(turnLength), refused("b"))
	require.True(t, seen(r, 2*turnLength-1, "a"))
	require.False(t, seen(r, 2*turnLength, "a"))
	require.True(t, seen(r, 2*turnLength, "b"))
	require.False(t, seen(r, 4*turnLength, "b"))

	for i := range 3 * maxScopes {
		r.Add(start.Add(5*turnLength), refused(fmt.Sprint(i)))
	}
	require.LessOrEqual(t, len(r.young)+len(r.old), 2*maxScopes)
}

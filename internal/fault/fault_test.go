package fault_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/fault"
)

func TestSentinels_OfOneCodeAreOneKind(t *testing.T) {
	t.Parallel()
	mine, yours, other := fault.New("busy", "mine: busy"), fault.New("busy", "yours: busy"), fault.New("late", "mine: late")
	require.ErrorIs(t, fmt.Errorf("while: %w", mine), yours)
	require.NotErrorIs(t, mine, other)
	require.NotErrorIs(t, mine, errors.New("busy"))
	require.Equal(t, "busy", fault.Code(fmt.Errorf("while: %w", mine)))
	require.Empty(t, fault.Code(errors.New("busy")))
}

func TestInvalid_NamesTheFieldAndKeepsTheKind(t *testing.T) {
	t.Parallel()
	kind := fault.New("invalid_argument", "x: invalid argument")
	err := fault.Invalid(kind, "Charge.Amount", "%d is not from 1 to %d", 0, 9)
	require.EqualError(t, err, "x: invalid argument: Charge.Amount: 0 is not from 1 to 9")
	require.ErrorIs(t, err, kind)
	require.Equal(t, "invalid_argument", fault.Code(fmt.Errorf("while: %w", err)))
}
